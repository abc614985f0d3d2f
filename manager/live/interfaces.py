"""At which address of this host the manager listens, so that compute nodes reach it.

A login node has several networks: the world's, the cluster's, a fast one. A site file may name the right one
(`interface = "ib0"`, or an address). Without a word (`auto`) it is the one that this host's own name leads to, which is
how batch systems find their hosts; names that lead to the loopback (Debian's 127.0.1.1) do not count, and then it is
the address from which this host would speak to the world.
"""

from __future__ import annotations

import difflib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import psutil

from stoker.errors import ConfigError

AUTO = "auto"
LOOPBACK = "127.0.0.1"
_ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody (RFC 5737): a datagram socket that is connected to it sends nothing, and has chosen its way."""


def resolve(interface: str) -> str:
    """The address of this host that is meant by the name of a network (`ib0`), an address, or `auto`.

    Raises ConfigError, which lists the networks of this host.
    """
    there = networks()
    if interface == AUTO:
        return choose(there, named=_named(), towards_world=_towards_world())
    if interface in there:
        return there[interface]
    if interface in there.values() or (_is_loopback(interface) and not _is_ipv6(interface)):
        return interface
    raise ConfigError(_unknown(interface, there))


def networks() -> dict[str, str]:
    """The networks of this host that have an IPv4 address, by name; the loopback is among them."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                found.setdefault(name, each.address)
    return found


def choose(there: Mapping[str, str], *, named: Sequence[str], towards_world: str) -> str:
    """What `auto` means, from a host's networks, the addresses that its name leads to, and its way to the world."""
    own = set(there.values())
    for address in (*named, towards_world):
        if address in own and not _is_loopback(address):
            return address
    return next((address for address in there.values() if not _is_loopback(address)), LOOPBACK)


def is_listening(address: str, *, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections at a ZeroMQ endpoint. It is not said to be a manager of ours."""
    where = urlsplit(address)
    if where.scheme == "ipc":
        return os.path.exists(where.path or where.netloc)
    try:
        with socket.create_connection((where.hostname or "", where.port or 0), timeout=timeout_s):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def no_way_to(address: str) -> str:
    """Why this host's own network leads nowhere near a ZeroMQ endpoint; empty if it has a way there. Sends nothing."""
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
        return f"{socket.gethostname()} has no network that leads to {host}"
    return ""


def _named() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _towards_world() -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect(_ANYWHERE)
            return str(way.getsockname()[0])
    except OSError:  # no default route
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _unknown(interface: str, there: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(interface, there, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    known = ", ".join(f"{name} {address}" for name, address in there.items())
    if _is_ipv6(interface):
        return f"interface {interface!r} is an IPv6 address, and a manager listens on IPv4: name one of {known}"
    return f"interface {interface!r} is no network of this host ({socket.gethostname()} has {known}){hint}"
