"""What a library process is told of itself: the first frame on its socket, before any message."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """One library's place on its pilot. Paths are absolute.

    `folder` is its own on local disk, `log` the file that its output goes to, `objects` the session's folder for
    large results, `search_path` is appended to `sys.path`. `host` is what other pilots reach this machine at.
    `gang_key` is the session's secret for gangs: what the ranks of one call prove to each other is made from it.
    `turns` is the board of the turns on the pilot's devices; empty where there is none. `probe` is the command that
    probes a device, without the device's name; empty where none is to be probed.
    """

    pilot: str
    library: int
    folder: str
    log: str
    objects: str
    search_path: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    gang_key: bytes = b""
    turns: str = ""
    probe: tuple[str, ...] = ()


decode = msgspec.msgpack.Decoder(Settings).decode
encode = msgspec.msgpack.Encoder().encode
