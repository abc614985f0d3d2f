"""Files that are replaced whole: what lies there is what was written last, or what was there before."""

from __future__ import annotations

from pathlib import Path

from stoker import whole_files
from stoker.errors import ConfigError


def write_whole(folder: Path, data: bytes, *, name: str) -> None:
    """Put these bytes into the folder under this name, whole or not at all; they reach the disk before the name does.

    Raises ConfigError if the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole_files.write_whole(folder / name, data, mode=0o666, sync=True)
    except OSError as error:
        raise ConfigError(f"{folder / name}: cannot be written: {error.strerror}", file=str(folder / name)) from None
