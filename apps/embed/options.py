"""What a run of embeddings can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import ConfigError


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one run. Empty texts are not given; `limit` 0 is every row. `text`: the column of the texts, and
    `id` the one that names the rows (their numbers do, without)."""

    data: str = ""
    model: str = ""
    text: str = "text"
    id: str = ""
    pooling: str = ""
    normalize: bool = True
    truncate: bool = False
    dtype: str = "auto"
    limit: int = 0
    batch_size: int = 256
    tensor_batch: int = 32
    format: str = "parquet"
    site: str = ""

    @property
    def kinds(self) -> dict[str, Any]:
        """What a vector depends on, beside its text and the model's files."""
        return {"text": self.text, "id": self.id, "pooling": self.pooling, "normalize": self.normalize,
                "truncate": self.truncate, "dtype": self.dtype}  # fmt: skip


def resolve(stored: dict[str, Any], given: dict[str, Any]) -> EmbedOptions:
    """Defaults, over them what the run to be resumed was started with, over that what was given now; with absolute
    paths. Raises ConfigError for stored options that this version cannot read, and where file or model is missing."""
    here = dict(given)
    for name in ("data", "site"):
        if here.get(name):
            here[name] = str(Path(here[name]).absolute())
    if here.get("model") and Path(here["model"]).exists():  # else it is a name on the model hub
        here["model"] = str(Path(here["model"]).absolute())
    try:
        options = msgspec.convert({**stored, **here}, EmbedOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the run's options cannot be read: {error}") from None
    for name, what in (("data", "a file of texts: stoker run embed FILE"), ("model", "an encoder: --model PATH")):
        if not getattr(options, name):
            raise ConfigError(f"embed wants {what}", key=name)
    return options
