"""Keys of clients: their file, the client of a request, and the limits of keys.

A key is 256 random bits, so its SHA-256 cannot be reversed by guessing. The file has mode 0600 and is replaced
atomically. A running gateway reads it again after a change. Times in seconds.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.failures import TryLater
from stoker.contexts import state_folder
from stoker.errors import ConfigError

WINDOW_S = 60.0
_SOON_S = 1.0
"""When to retry if another request of the key must end first."""


class KeyLimits(msgspec.Struct, frozen=True):
    """Limits of a key; 0 = none. Tokens are read and written ones."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0

    @property
    def rates(self) -> KeyLimits:
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute)

    @property
    def for_batches(self) -> KeyLimits:
        """The part for batches: a tenth, and at least 1, is left to other requests if the limit is above 1."""
        return KeyLimits(*(most and max(1, most - max(1, most // 10)) for most in msgspec.structs.astuple(self)))


class LimitReached(msgspec.Struct, frozen=True):
    """Why a request is refused, and when the next one may come."""

    message: str
    code: str
    retry_after_s: float


class KeyUse(msgspec.Struct):
    """The use of a key in the last minute."""

    running: int = 0
    requests: deque[float] = msgspec.field(default_factory=deque)
    tokens: deque[tuple[float, int]] = msgspec.field(default_factory=deque)
    """End times of requests, and their tokens."""

    def begin(self, limits: KeyLimits, *, now: float) -> LimitReached | None:
        """Count a request if it may start; otherwise return why not."""
        self.forget(now)
        if reached := self._reached(limits, now):
            return reached
        self.resume()
        self.requests.append(now)
        return None

    def resume(self) -> None:
        self.running += 1

    def end(self, tokens: int, *, now: float) -> None:
        """Count an ended request; `tokens`: read and written."""
        self.running -= 1
        if tokens:
            self.tokens.append((now, tokens))

    def _reached(self, limits: KeyLimits, now: float) -> LimitReached | None:
        if limits.concurrent and self.running >= limits.concurrent:
            message = f"{self.running} requests of this key are running, and {limits.concurrent} may"
            return LimitReached(message, "concurrent_requests", _SOON_S)
        if limits.requests_per_minute and len(self.requests) >= limits.requests_per_minute:
            wait_s = self.requests[-limits.requests_per_minute] + WINDOW_S - now
            message = f"this key may send {limits.requests_per_minute} requests a minute"
            return LimitReached(message, "requests_per_minute", wait_s)
        used = sum(tokens for _, tokens in self.tokens)
        if limits.tokens_per_minute and used >= limits.tokens_per_minute:
            message = f"this key may read and write {limits.tokens_per_minute:,} tokens a minute, and has used {used:,}"
            return LimitReached(message, "tokens_per_minute", self._room_in(limits.tokens_per_minute, used, now))
        return None

    def _room_in(self, most: int, used: int, now: float) -> float:
        for at, tokens in self.tokens:
            used -= tokens
            if used < most:
                return at + WINDOW_S - now
        return WINDOW_S

    def forget(self, now: float) -> None:
        while self.requests and self.requests[0] <= now - WINDOW_S:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= now - WINDOW_S:
            self.tokens.popleft()


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
    """The file of keys at `path`. Without a file no keys are needed; with an empty one no key is valid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._by_digest: dict[str, KeyRecord] = {}

    @classmethod
    def usual(cls) -> KeyFile:
        return cls(state_folder() / "serve" / "keys.json")

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def read(self) -> tuple[KeyRecord, ...]:
        """Return the keys. Raises ConfigError for a damaged file, or one that others may read."""
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
        """Make a key and return it; it is stored nowhere. Raises ConfigError for a name in use."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r:.80} is not a name for a key: letters, digits, and . _ @ - after the first")
        keys = self.read()
        if any(each.name == name for each in keys):
            raise ConfigError(f"there is a key {name} already; remove it first: stoker serve keys remove {name}")
        key = _BEGINS + secrets.token_urlsafe(32)
        self._write((*keys, KeyRecord(name, digest_of(key), int(time.time()), limits)))
        return key

    def remove(self, name: str) -> None:
        keys = self.read()
        if all(each.name != name for each in keys):
            known = ", ".join(each.name for each in keys) or "none"
            raise ConfigError(f"there is no key {name}; there are: {known}")
        self._write(tuple(each for each in keys if each.name != name))

    def find(self, key: str) -> KeyRecord | None:
        """Return the record of a key; reads the file again after a change. Raises ConfigError as `read`."""
        self._refresh_keys()
        return self._by_digest.get(digest_of(key))

    def named(self, name: str) -> KeyRecord | None:
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
    return hashlib.sha256(key.encode()).hexdigest()


class Caller(msgspec.Struct):
    """The client of a request: its key's name (empty without keys), limits, and recent use."""

    name: str = ""
    limits: KeyLimits = KeyLimits()
    use: KeyUse = msgspec.field(default_factory=KeyUse)


class HeldRequest:
    """A running request of a key. `tokens`: read and written; counted when it ends."""

    def __init__(self, use: KeyUse) -> None:
        self.tokens = 0
        self._use: KeyUse | None = use

    def end(self) -> None:
        """Count the end; a second call has no effect."""
        use, self._use = self._use, None
        if use is not None:
            use.end(self.tokens, now=time.monotonic())


class Guard:
    """Checks keys and limits. Without a key file, everybody who reaches the gateway may ask."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys
        self._uses: dict[str, KeyUse] = {}

    @property
    def is_open(self) -> bool:
        return not self._keys.exists

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the client of a request. Raises RequestRefused (401; 403 for another site's page in a browser)."""
        if self.is_open:
            _refuse_foreign_pages(headers.get("host", ""), headers.get("origin"))
            return Caller()
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise _refused("no key was given; send it as `Authorization: Bearer KEY`")
        record = self._keys.find(key.strip())
        if record is None:
            raise _refused("this key is not valid here")
        return self._caller_of(record)

    def caller_named(self, name: str) -> Caller | None:
        """Return the client with this key name; None if it does not exist or the file cannot be read."""
        try:
            record = self._keys.named(name)
        except (OSError, ConfigError):
            return None
        return self._caller_of(record) if record is not None else None

    def begin(self, caller: Caller, *, limits: KeyLimits | None = None) -> HeldRequest:
        """Start a request. Raises TryLater (429) if the caller's limits (or `limits`) do not allow it."""
        if reached := caller.use.begin(limits or caller.limits, now=time.monotonic()):
            raise TryLater(
                reached.message, type="rate_limit_error", code=reached.code, status=429,
                retry_after_s=reached.retry_after_s,
            )  # fmt: skip
        return HeldRequest(caller.use)

    def begin_if(self, caller: Caller, *, limits: KeyLimits) -> HeldRequest | None:
        """As `begin`, but return None if the limits do not allow it."""
        return None if caller.use.begin(limits, now=time.monotonic()) else HeldRequest(caller.use)

    def resume(self, caller: Caller) -> HeldRequest:
        """Count a request that runs since before this gateway."""
        caller.use.resume()
        return HeldRequest(caller.use)

    def tokens_of(self, caller: Caller) -> int:
        caller.use.forget(time.monotonic())
        return sum(tokens for _, tokens in caller.use.tokens)

    def _caller_of(self, record: KeyRecord) -> Caller:
        return Caller(record.name, record.limits, self._uses.setdefault(record.digest, KeyUse()))


def _refuse_foreign_pages(host: str, origin: str | None) -> None:
    """Raise RequestRefused for pages of other sites. Any page in a browser on this machine can send requests here,
    also under a name of its owner's (DNS rebinding).
    """
    name = urlsplit(f"//{host}").hostname or ""
    is_own = "." not in name or _is_address(name) or name == socket.getfqdn()
    if not is_own or (origin is not None and urlsplit(origin).netloc != host):
        raise RequestRefused(
            "a page of another site asks, and no keys are set here: stoker serve keys add NAME",
            type="authentication_error", code="foreign_page", status=403,
        )  # fmt: skip


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, type="authentication_error", code="invalid_api_key", status=401)
