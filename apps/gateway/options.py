"""The options of a gateway."""

from __future__ import annotations

from pathlib import Path

import msgspec


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one gateway. An empty string or 0 selects the default."""

    site: str = ""
    models: Path
    host: str = "127.0.0.1"
    port: int = 0
    uds: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    session: str = ""
    origins: tuple[str, ...] = ()
    """Sites whose pages may send requests with a key; empty: all sites."""
    most_bytes: int = 32_000_000
    workers: int = 1
    as_json: bool = False
    """True to print the address as one JSON document, and readable text to stderr."""
