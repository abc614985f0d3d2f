"""Recorded logs and figures for experiments."""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path

from stoker.whole_files import write_whole

FOLDER = Path(__file__).parent


def read(name: str) -> bytes:
    return lzma.decompress((FOLDER / f"{name}.xz").read_bytes())


def write(name: str, content: bytes) -> None:
    write_whole(FOLDER / f"{name}.xz", lzma.compress(content, preset=9 | lzma.PRESET_EXTREME), mode=0o644)


def members(name: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(read(f"{name}.tar"))) as archive:
        return {one.name: file.read() for one in archive if (file := archive.extractfile(one)) is not None}
