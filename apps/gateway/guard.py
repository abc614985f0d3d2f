"""Who asks, by the key that a request brings, and whether the key's limits allow it."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from stoker.apps.common.openai.request import RequestRefused
from stoker.apps.gateway.failures import TryLater
from stoker.apps.gateway.key_file import KeyFile, KeyRecord
from stoker.apps.gateway.limits import KeyLimits, KeyUse
from stoker.errors import ConfigError


class Caller(msgspec.Struct):
    """Who asks: the name of a key (empty where none is wanted), its limits, and what it has asked lately."""

    name: str = ""
    limits: KeyLimits = KeyLimits()
    use: KeyUse = msgspec.field(default_factory=KeyUse)


class HeldRequest:
    """A request of a key that runs. `tokens`: what it has read and written, which is counted when it ends."""

    def __init__(self, use: KeyUse) -> None:
        self.tokens = 0
        self._use: KeyUse | None = use

    def end(self) -> None:
        """It is over; twice is no error."""
        use, self._use = self._use, None
        if use is not None:
            use.end(self.tokens, now=time.monotonic())


class Guard:
    """Checks keys and limits. Where there is no key file, everybody may ask who reaches the gateway."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys
        self._uses: dict[str, KeyUse] = {}

    @property
    def is_open(self) -> bool:
        """Whether requests need no key."""
        return not self._keys.exists

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who sends these headers. Raises RequestRefused (401; 403 for another site's page in a browser)."""
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
        """Whose key has this name; None if there is none, or the file of keys cannot be read."""
        try:
            record = self._keys.named(name)
        except (OSError, ConfigError):
            return None
        return self._caller_of(record) if record is not None else None

    def begin(self, caller: Caller, *, limits: KeyLimits | None = None) -> HeldRequest:
        """A request of a caller begins. Raises TryLater (429) where its limits do not allow it; `limits`: others than
        the caller's."""
        if reached := caller.use.begin(limits or caller.limits, now=time.monotonic()):
            raise TryLater(
                reached.message, type="rate_limit_error", code=reached.code, status=429,
                retry_after_s=reached.retry_after_s,
            )  # fmt: skip
        return HeldRequest(caller.use)

    def begin_if(self, caller: Caller, *, limits: KeyLimits) -> HeldRequest | None:
        """`begin`, or None where the limits do not allow it."""
        return None if caller.use.begin(limits, now=time.monotonic()) else HeldRequest(caller.use)

    def resume(self, caller: Caller) -> HeldRequest:
        """A request of a caller that runs since before this gateway."""
        caller.use.resume()
        return HeldRequest(caller.use)

    def tokens_of(self, caller: Caller) -> int:
        """The tokens that a caller's requests have read and written in the last minute."""
        caller.use.forget(time.monotonic())
        return sum(tokens for _, tokens in caller.use.tokens)

    def _caller_of(self, record: KeyRecord) -> Caller:
        return Caller(record.name, record.limits, self._uses.setdefault(record.digest, KeyUse()))


def _refuse_foreign_pages(host: str, origin: str | None) -> None:
    """Any page that somebody on this machine looks at can have the browser send requests here, also under a name of its
    own (DNS rebinding). Raises RequestRefused for them."""
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
