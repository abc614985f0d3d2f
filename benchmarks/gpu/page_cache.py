"""The page cache: drop files from it, and tell how much of them it holds."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_FAILED = ctypes.c_void_p(-1).value


def drop(files: Iterable[Path]) -> float:
    """Ask the kernel to drop these files; return the share that it still holds. Pages that are mapped stay."""
    files = list(files)
    for file in files:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return held(files)


def held(files: Iterable[Path]) -> float:
    """Return the share of the pages of these files that are in memory."""
    pages = inside = 0
    for file in {(each.stat().st_dev, each.stat().st_ino): each for each in files}.values():
        of_file = _resident(file)
        pages += len(of_file)
        inside += sum(1 for page in of_file if page & 1)
    return inside / max(1, pages)


def _resident(file: Path) -> bytes:
    """Return a byte for each page of a file; the lowest bit is 1 if the page is in memory."""
    size = file.stat().st_size
    if not size:
        return b""
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with file.open("rb") as opened:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), f"{file} cannot be mapped")
    try:
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), f"mincore of {file}")
    finally:
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return bytes(found)
