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
from stoker.apps.gateway.key_file import KeyFile
from stoker.apps.gateway.limits import KeyLimits, KeyUse


class Caller(msgspec.Struct):
    """Who asks: the name of a key (empty where none is wanted), its limits, and what it has asked lately."""

    name: str = ""
    limits: KeyLimits = KeyLimits()
    use: KeyUse = msgspec.field(default_factory=KeyUse)


class HeldRequest:
    """A request of a key that runs. `tokens`: what it has read and written, counted when it ends."""

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
        return Caller(record.name, record.limits, self._uses.setdefault(record.digest, KeyUse()))

    def begin(self, caller: Caller) -> HeldRequest:
        """A request of a caller begins. Raises TryLater (429) where its limits do not allow it."""
        if reached := caller.use.begin(caller.limits, now=time.monotonic()):
            raise TryLater(
                reached.message, type="rate_limit_error", code=reached.code, status=429,
                retry_after_s=reached.retry_after_s,
            )  # fmt: skip
        return HeldRequest(caller.use)


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
