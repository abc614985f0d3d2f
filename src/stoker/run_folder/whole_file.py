"""Files that are replaced whole: what lies there is what was written last, or what was there before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stoker.errors import ConfigError


def write_whole(folder: Path, data: bytes, *, name: str) -> None:
    """Put these bytes into the folder under this name, whole or not at all; they reach the disk before the name does.

    Raises ConfigError if the folder can't be written.
    """
    draft = folder / f".{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise ConfigError(f"{folder / name}: cannot be written: {error.strerror}", file=str(folder / name)) from None
