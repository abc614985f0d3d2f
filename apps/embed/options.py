"""The options of a run that embeds texts."""

from __future__ import annotations

import msgspec


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an embedding run. An empty string selects the default. `limit`: 0 for all rows."""

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
