"""Rows of data files and of saved data sets, read with the place of each, so that a bad row can be named; rows written.

The ending decides the format: `.csv`, `.tsv`, `.jsonl`, `.ndjson` (these also `.gz` and `.xz`), `.parquet`, `.arrow`,
`.feather`, `.ipc`. A folder that Hugging Face's `save_to_disk` wrote is read as it lies there; `datasets` need not be
installed. Rows are read lazily, a few thousand at a time: a file may be larger than memory.
"""

from __future__ import annotations

from stoker.datafile.reading import digest_file, read_lines, read_rows, text_field
from stoker.datafile.row import Line, Row
from stoker.datafile.writing import write_rows

__all__ = ["Line", "Row", "digest_file", "read_lines", "read_rows", "text_field", "write_rows"]
