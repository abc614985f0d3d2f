"""Recorded logs and figures for experiments.

Commit 1f7d0bf1 has the programs that recorded them: `benchmarks/papers/schedmate/failures/recording.py` and
`clusters.py` (the logs of failures), `benchmarks/papers/schedmate/collection.py` (the collections of recipes).
"""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path

FOLDER = Path(__file__).parent


def read(name: str) -> bytes:
    return lzma.decompress((FOLDER / f"{name}.xz").read_bytes())


def members(name: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(read(f"{name}.tar"))) as archive:
        return {one.name: file.read() for one in archive if (file := archive.extractfile(one)) is not None}
