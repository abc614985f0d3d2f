"""Choose the address on which the manager listens, so that compute nodes can reach it.

A site file may name a network interface (`interface = "ib0"`) or an address. By default (`auto`), the manager listens
on the address of this host's name. If that is a loopback address (Debian's 127.0.1.1), it listens on the address on the
route to the internet.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import psutil

from stoker.config_errors import suggest_similar_name
from stoker.errors import ConfigError

AUTO = "auto"
LOOPBACK = "127.0.0.1"
_CONNECT_S = 1.0
_OUTSIDE_ADDRESS = ("192.0.2.1", 9)
"""An unused address (RFC 5737). For it, a datagram socket selects a route without sending anything."""


def resolve_interface(interface: str) -> str:
    """Return the address of `interface`: a network (`ib0`), an address, or `auto`. Raises ConfigError."""
    there = list_network_addresses()
    if interface == AUTO:
        return choose_address(there, named=_find_host_addresses(), route_address=_find_route_address())
    if interface in there:
        return there[interface]
    address = _parse_address(interface)
    is_v6 = address is not None and address.version == 6
    if interface in there.values() or (address is not None and address.is_loopback and not is_v6):
        return interface
    known = ", ".join(f"{name} {each}" for name, each in there.items())
    if is_v6:
        raise ConfigError(
            f"interface {interface!r} is an IPv6 address, and a manager listens on IPv4: name one of {known}"
        )
    text = f"interface {interface!r} is not a network of this host ({socket.gethostname()} has {known})"
    raise ConfigError("; ".join(filter(None, [text, suggest_similar_name(interface, there, cutoff=0.5, otherwise="")])))


def list_network_addresses() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                found.setdefault(name, each.address)
    return found


def choose_address(there: Mapping[str, str], *, named: Sequence[str], route_address: str) -> str:
    own = set(there.values())
    for address in (*named, route_address):
        if address in own and not _is_loopback(address):
            return address
    return next((address for address in there.values() if not _is_loopback(address)), LOOPBACK)


def is_listening(address: str) -> bool:
    where = urlsplit(address)
    if where.scheme == "ipc":
        return os.path.exists(where.path or where.netloc)
    try:
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def explain_missing_route(address: str) -> str:
    """Return why this host has no route to a ZeroMQ endpoint; empty if a route exists or the check fails."""
    where = urlsplit(address)
    host = where.hostname or ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, where.port or 0))
    except (OSError, ValueError, OverflowError) as error:
        if getattr(error, "errno", None) != errno.ENETUNREACH:
            return ""
        if _is_loopback(host):
            return f"the loopback interface of {socket.gethostname()} is down; bring it up: ip link set lo up"
        return f"{socket.gethostname()} has no network route to {host}"
    return ""


def _find_host_addresses() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _find_route_address() -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect(_OUTSIDE_ADDRESS)
            return str(way.getsockname()[0])
    except OSError:  # no default route
        return ""


def _is_loopback(address: str) -> bool:
    found = _parse_address(address)
    return found is not None and found.is_loopback


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
