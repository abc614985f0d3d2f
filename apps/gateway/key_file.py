"""Keys on disk: a name, the digest of a key, and its limits. The key itself is shown once, when it is made.

A key is 256 random bits, so its SHA-256 is not reversed by guessing. The file is its owner's alone (mode 0600) and is
written whole. A gateway that runs reads it again when it has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import time
from pathlib import Path

import msgspec

from stoker.apps.gateway.limits import KeyLimits
from stoker.contexts import state_folder
from stoker.errors import ConfigError

_BEGINS = "sk-stoker-"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key. `digest` is the SHA-256 of the key; `created` is seconds since the epoch."""

    name: str
    digest: str
    created: int
    limits: KeyLimits = KeyLimits()


class _KeysOnDisk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[KeyRecord, ...] = ()


class KeyFile:
    """The file of keys at `path`. Without a file no keys are wanted; with an empty one no key is valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._by_digest: dict[str, KeyRecord] = {}

    @classmethod
    def usual(cls) -> KeyFile:
        """The file of this user's gateways."""
        return cls(state_folder() / "serve" / "keys.json")

    @property
    def exists(self) -> bool:
        """Whether keys are wanted."""
        return self.path.exists()

    def read(self) -> tuple[KeyRecord, ...]:
        """The keys. Raises ConfigError for a file that is damaged, or that others may read."""
        try:
            data, mode = self.path.read_bytes(), self.path.stat().st_mode
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}", file=str(self.path)) from None
        if mode & 0o077:
            raise ConfigError(f"{self.path}: others may read it; chmod 600 {self.path}", file=str(self.path))
        try:
            return msgspec.json.decode(data, type=_KeysOnDisk).keys
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: is damaged: {error}", file=str(self.path)) from None

    def add(self, name: str, limits: KeyLimits) -> str:
        """Make a key; it is nowhere else than in what this returns. Raises ConfigError for a name that is taken."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r:.80} is not a name for a key: letters, digits, and . _ @ - after the first")
        keys = self.read()
        if any(each.name == name for each in keys):
            raise ConfigError(f"there is a key {name} already; remove it first: stoker serve keys remove {name}")
        key = _BEGINS + secrets.token_urlsafe(32)
        self._write((*keys, KeyRecord(name, digest_of(key), int(time.time()), limits)))
        return key

    def remove(self, name: str) -> None:
        """Forget a key. Raises ConfigError if there is none of this name."""
        keys = self.read()
        if all(each.name != name for each in keys):
            known = ", ".join(each.name for each in keys) or "none"
            raise ConfigError(f"there is no key {name}; there are: {known}")
        self._write(tuple(each for each in keys if each.name != name))

    def find(self, key: str) -> KeyRecord | None:
        """Whose key it is; the file is read again if it has changed. Raises ConfigError as `read`."""
        self._refresh_keys()
        return self._by_digest.get(digest_of(key))

    def named(self, name: str) -> KeyRecord | None:
        """The key of this name; the file is read again if it has changed. Raises ConfigError as `read`."""
        self._refresh_keys()
        return next((each for each in self._by_digest.values() if each.name == name), None)

    def _refresh_keys(self) -> None:
        stat = self.path.stat() if self.path.exists() else None
        stamp = (stat.st_mtime_ns, stat.st_ino) if stat else None
        if stamp != self._stamp:
            self._by_digest = {each.digest: each for each in self.read()}
            self._stamp = stamp

    def _write(self, keys: tuple[KeyRecord, ...]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, draft = tempfile.mkstemp(dir=self.path.parent, prefix=".keys-")  # mode 0600
        try:
            with os.fdopen(file, "wb") as out:
                out.write(msgspec.json.format(msgspec.json.encode(_KeysOnDisk(keys))) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, self.path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()
