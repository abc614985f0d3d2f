"""The options of a run of embeddings."""

from __future__ import annotations

import msgspec


class EmbedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one run. Empty texts and `limit` 0 mean the defaults. `text`: the column of the texts; `id`: the
    column of row names (empty: row numbers).
    """

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
