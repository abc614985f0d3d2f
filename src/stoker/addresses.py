"""An address as people write it: `host:port`, or `[host]:port` for IPv6. It travels with the starter."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
