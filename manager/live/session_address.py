"""`session.json`, by which programs and pilots find the manager: its address and its public key."""

from __future__ import annotations

import logging
import os

from stoker.errors import SessionError
from stoker.protocol.session import SessionFile, SessionFolder

log = logging.getLogger("stoker.manager")


class SessionAddress:
    """Keeps the session's file as it should be. `before`: the file that an earlier manager of the session wrote.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, folder: SessionFolder, file: SessionFile, *, before: SessionFile | None) -> None:
        self._folder = folder
        self._file = file
        try:
            folder.write(file)
        except (
            OSError
        ):  # a full disk: a file that says the same may stay, and its new time tells that a manager listens
            if before != file:
                raise
            os.utime(folder.file)

    def write_again(self) -> None:
        """Write the file anew if it was removed or damaged. On any thread. Raises OSError."""
        folder = self._folder
        try:
            if folder.read() == self._file:
                return
        except SessionError as error:
            what = str(error) if folder.file.exists() else f"{folder.file} was removed"
            log.warning("%s; it is written again", what)
        folder.write(self._file)


def check_folder(folder: SessionFolder) -> None:
    """Raise SessionError unless the folder can hold a session."""
    if not folder.key_file("server").exists():
        raise SessionError(f"{folder.path} is not a session folder: it has no keys; `stoker.load()` makes one")
