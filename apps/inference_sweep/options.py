"""What a sweep can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from stoker.errors import ConfigError


class SweepOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one sweep. Empty texts are not given; `limit` 0 is every row, `tensor_batch` 0 leaves it to the
    engine how many rows of a call are written at a time."""

    sweep: str = ""
    data: str = ""
    limit: int = 0
    batch_size: int = 4
    tensor_batch: int = 0
    format: str = "parquet"
    site: str = ""


def resolve(stored: dict[str, Any], given: dict[str, Any]) -> SweepOptions:
    """Defaults, over them what the run to be resumed was started with, over that what was given now; with absolute
    paths. Raises ConfigError for stored options that this version cannot read."""
    here = dict(given)
    for name in ("sweep", "data", "site"):
        if here.get(name):
            here[name] = str(Path(here[name]).absolute())
    try:
        return msgspec.convert({**stored, **here}, SweepOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the run's options cannot be read: {error}") from None
