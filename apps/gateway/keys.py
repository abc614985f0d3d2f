"""API keys of clients and groups of keys: the key file, the client of a request, and limits.

A key has 256 random bits, so its SHA-256 does not reveal the key. The key file has mode 0600 and is replaced
atomically. A running gateway reads the file again after a change. All times are in seconds.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from stoker.apps.common.openai_requests import RequestRefused
from stoker.contexts import state_folder
from stoker.errors import ConfigError

WINDOW_S = 60.0
_SOON_S = 1.0
"""Seconds after which a client should retry, if another request of its key must end first."""


class KeyLimits(msgspec.Struct, frozen=True):
    """Limits of a key or a group; 0 = unlimited. Tokens include tokens read and written."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0

    def reduce_for_batches(self) -> KeyLimits:
        """Reduce each limit above 1 by a tenth, at least by 1, to leave capacity for other requests."""
        return KeyLimits(*(most and max(1, most - max(1, most // 10)) for most in msgspec.structs.astuple(self)))


class KeyUse(msgspec.Struct):
    """The use of a key or a group in the last minute. `tokens`: end time and tokens of each request."""

    running: int = 0
    requests: deque[float] = msgspec.field(default_factory=deque)
    tokens: deque[tuple[float, int]] = msgspec.field(default_factory=deque)

    def count_request_start(self, now: float) -> None:
        self.running += 1
        self.requests.append(now)

    def count_request_end(self, tokens: int, *, now: float) -> None:
        self.running -= 1
        if tokens:
            self.tokens.append((now, tokens))

    def find_exceeded_limit(self, limits: KeyLimits, *, now: float, who: str = "this key") -> RequestRefused | None:
        """Return an error (429) if another request would exceed a limit, else None. `who`: the owner of the limits."""
        used = self.count_recent_tokens(now)
        while self.requests and self.requests[0] <= now - WINDOW_S:
            self.requests.popleft()
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        if limits.concurrent and self.running >= limits.concurrent:
            code, wait_s = "concurrent_requests", _SOON_S
            message = f"{self.running} requests of {who} are running, and at most {limits.concurrent} may run at a time"
        elif requests and len(self.requests) >= requests:
            code, wait_s = "requests_per_minute", self.requests[-requests] + WINDOW_S - now
            message = f"{who} may send {requests} requests a minute"
        elif tokens and used >= tokens:
            code, wait_s = "tokens_per_minute", self._seconds_until_room(tokens, used, now)
            message = f"{who} may read and write {tokens:,} tokens a minute, and has used {used:,}"
        else:
            return None
        return RequestRefused(message, type="rate_limit_error", code=code, status=429, retry_after_s=wait_s)

    def count_recent_tokens(self, now: float) -> int:
        while self.tokens and self.tokens[0][0] <= now - WINDOW_S:
            self.tokens.popleft()
        return sum(tokens for _, tokens in self.tokens)

    def _seconds_until_room(self, most: int, used: int, now: float) -> float:
        for at, tokens in self.tokens:
            used -= tokens
            if used < most:
                return at + WINDOW_S - now
        return WINDOW_S


_KEY_PREFIX = "sk-stoker-"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key. `digest`: SHA-256 of the key; `created`: seconds since the epoch; `admin`: True if it may read the usage
    of all keys.
    """

    name: str
    digest: str
    created: int
    limits: KeyLimits = KeyLimits()
    group: str = ""
    admin: bool = False


class StoredKeys(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Keys by name, and limits by group."""

    keys: dict[str, KeyRecord] = {}
    groups: dict[str, KeyLimits] = {}


class KeyFile:
    """The keys and groups on disk. Without a file, requests need no key. A file without keys refuses all requests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._kept = StoredKeys()
        self._by_digest: dict[str, KeyRecord] = {}

    @classmethod
    def at_default_path(cls) -> KeyFile:
        return cls(state_folder() / "serve" / "keys.json")

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def _read_from_disk(self) -> StoredKeys:
        try:
            data, mode = self.path.read_bytes(), self.path.stat().st_mode
        except FileNotFoundError:
            return StoredKeys()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}", file=str(self.path)) from None
        if mode & 0o077:
            raise ConfigError(f"{self.path}: other users may read it; chmod 600 {self.path}", file=str(self.path))
        try:
            return msgspec.json.decode(data, type=StoredKeys)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: is damaged: {error}", file=str(self.path)) from None

    def add_key(self, name: str, limits: KeyLimits, *, group: str = "", admin: bool = False) -> str:
        """Create and return a key; only its digest is stored."""
        _check_name_syntax(name, what="a key")
        kept = self._read_from_disk()
        if name in kept.keys:
            raise ConfigError(f"there is a key {name} already; remove it first: stoker serve keys remove {name}")
        _check_group_exists(group, kept)
        key = _KEY_PREFIX + secrets.token_urlsafe(32)
        kept.keys[name] = KeyRecord(name, digest_key(key), int(time.time()), limits, group, admin)
        self._write_to_disk(kept)
        return key

    def change_key(self, name: str, limits: KeyLimits, *, group: str = "", admin: bool = False) -> KeyRecord:
        kept = self._read_from_disk()
        _check_name_exists(name, kept.keys, "key")
        _check_group_exists(group, kept)
        kept.keys[name] = msgspec.structs.replace(kept.keys[name], limits=limits, group=group, admin=admin)
        self._write_to_disk(kept)
        return kept.keys[name]

    def remove_key(self, name: str) -> None:
        kept = self._read_from_disk()
        _check_name_exists(name, kept.keys, "key")
        del kept.keys[name]
        self._write_to_disk(kept)

    def set_group(self, name: str, limits: KeyLimits) -> None:
        _check_name_syntax(name, what="a group")
        kept = self._read_from_disk()
        kept.groups[name] = limits
        self._write_to_disk(kept)

    def remove_group(self, name: str) -> None:
        """Remove a group that has no keys."""
        kept = self._read_from_disk()
        _check_name_exists(name, kept.groups, "group")
        if members := [each.name for each in kept.keys.values() if each.group == name]:
            raise ConfigError(f"the group {name} has keys: {', '.join(members)}; remove them first")
        del kept.groups[name]
        self._write_to_disk(kept)

    def find_key(self, key: str) -> KeyRecord | None:
        self.read_current()
        return self._by_digest.get(digest_key(key))

    def read_current(self) -> StoredKeys:
        """Return the content of the file. A changed file is read again.

        Raises ConfigError for a damaged file, or a file that other users may read.
        """
        stat = self.path.stat() if self.path.exists() else None
        stamp = (stat.st_mtime_ns, stat.st_ino) if stat else None
        if stamp != self._stamp:
            self._kept = self._read_from_disk()
            self._by_digest = {each.digest: each for each in self._kept.keys.values()}
            self._stamp = stamp
        return self._kept

    def _write_to_disk(self, kept: StoredKeys) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, draft = tempfile.mkstemp(dir=self.path.parent, prefix=".keys-")  # mode 0600
        try:
            with os.fdopen(file, "wb") as out:
                out.write(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            os.replace(draft, self.path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise


def _check_name_syntax(name: str, *, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.80} is not a name for {what}; use 1 to 64 letters, digits and _; after the first character"
            " also . @ -"
        )


def _check_name_exists(name: str, known: Mapping[str, object], what: str) -> None:
    if name not in known:
        raise ConfigError(f"there is no {what} {name}; there are: {', '.join(known) or 'none'}")


def _check_group_exists(group: str, kept: StoredKeys) -> None:
    if group and group not in kept.groups:
        raise ConfigError(f"there is no group {group}; make it first: stoker serve groups set {group}")


def digest_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Caller(msgspec.Struct):
    """The client of a request. `name`: name of its key, empty without keys; `who`: the client in error messages."""

    name: str = ""
    limits: KeyLimits = KeyLimits()
    use: KeyUse = msgspec.field(default_factory=KeyUse)
    who: str = "this key"
    group: Caller | None = None
    admin: bool = False

    @property
    def limit_owners(self) -> tuple[Caller, ...]:
        return (self, self.group) if self.group is not None else (self,)

    @property
    def has_limits(self) -> bool:
        return self.limits != KeyLimits() or self.group is not None


class CountedRequest:
    """A running request that counts for its key and group. `ends`: functions that record its end and its tokens."""

    def __init__(self, *ends: Callable[..., None]) -> None:
        self.tokens = 0
        self._ends = ends

    def end_request(self) -> None:
        ends, self._ends = self._ends, ()
        for end in ends:
            end(self.tokens, now=time.monotonic())


class KeyGuard:
    """Checks keys and limits. Without a key file, every client that can connect may send requests."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys
        self._uses: dict[str, KeyUse] = {}

    @property
    def is_open(self) -> bool:
        return not self._keys.exists

    def identify_caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the client that sent these headers. Raises RequestRefused for a missing or invalid key."""
        if self.is_open:
            _refuse_pages_of_other_sites(headers.get("host", ""), headers.get("origin"))
            return Caller()
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise _authentication_error("no key was given; send it as `Authorization: Bearer KEY`")
        record = self._keys.find_key(key.strip())
        if record is None:
            raise _authentication_error("this key is not valid here")
        return self._make_caller(record)

    def find_caller_by_key_name(self, name: str) -> Caller | None:
        """Return the client with this key, or None if the key is missing or the key file is unreadable."""
        try:
            record = self._keys.read_current().keys.get(name)
        except (OSError, ConfigError):
            return None
        return self._make_caller(record) if record is not None else None

    def begin_request(
        self, caller: Caller, *, used: Callable[[KeyLimits], KeyLimits] = lambda limits: limits
    ) -> CountedRequest:
        """Count a new request for its key and group. `used`: may reduce the limits for this check. Raises
        RequestRefused (429).
        """
        now = time.monotonic()
        for each in caller.limit_owners:
            if reached := each.use.find_exceeded_limit(used(each.limits), now=now, who=each.who):
                raise reached
        for each in caller.limit_owners:
            each.use.count_request_start(now)
        return CountedRequest(*(each.use.count_request_end for each in caller.limit_owners))

    async def begin_request_async(self, caller: Caller) -> CountedRequest:
        return self.begin_request(caller)

    def begin_request_for_key_name(self, name: str) -> CountedRequest:
        caller = self.find_caller_by_key_name(name)
        if caller is None:
            raise _authentication_error("this key is not valid here")
        return self.begin_request(caller)

    def resume_request(self, caller: Caller) -> CountedRequest:
        """Count a running request that an earlier gateway began, without a check of the limits."""
        for each in caller.limit_owners:
            each.use.running += 1
        return CountedRequest(*(each.use.count_request_end for each in caller.limit_owners))

    def _make_caller(self, record: KeyRecord) -> Caller:
        shared = None
        if (limits := self._keys.read_current().groups.get(record.group)) is not None:
            use = self._uses.setdefault(f"group {record.group}", KeyUse())
            shared = Caller(record.group, limits, use, f"the group {record.group}")
        use = self._uses.setdefault(record.digest, KeyUse())
        return Caller(record.name, record.limits, use, group=shared, admin=record.admin)


def _refuse_pages_of_other_sites(host: str, origin: str | None) -> None:
    """Refuse requests of other sites' web pages, because any page in a browser on this machine can send requests (also
    by DNS rebinding).
    """
    name = urlsplit(f"//{host}").hostname or ""
    try:
        is_own = "." not in name or bool(ipaddress.ip_address(name))
    except ValueError:
        is_own = name == socket.getfqdn()
    if not is_own or (origin is not None and urlsplit(origin).netloc != host):
        raise RequestRefused(
            "a web page of another origin sent the request, and this gateway has no keys: stoker serve keys add NAME"
            " creates a key",
            type="authentication_error", code="foreign_page", status=403,
        )  # fmt: skip


def _authentication_error(message: str) -> RequestRefused:
    return RequestRefused(message, type="authentication_error", code="invalid_api_key", status=401)
