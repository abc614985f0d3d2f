from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from transfer.hosts import KEY, Host

from stoker.connections import split_address
from stoker.contexts.objects import manifest_of, object_of
from stoker.pilot.transfer import fetch, wire
from stoker.pilot.transfer.board import ObjectCopy
from stoker.pilot.transfer.seed import Seed
from stoker.pilot.transfer.server import ObjectServer

HONEST = 40


@pytest.mark.parametrize(("kind", "stranger"), [("pilot", "127.0.0.1"), ("seed", "127.0.0.2")])
def test_forty_silent_sockets_refuse_no_honest_fetch(
    kind: str, stranger: str, host: Callable[..., Host], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"seven and a half kilobytes" * 300)
    ref = object_of(path)
    server: ObjectServer
    if kind == "pilot":
        one = host()
        one.copies[ref.name] = ObjectCopy(path, ref.name, manifest_of(ref), whole=True)
        server = one.server
    else:
        objects = tmp_path / "objects"
        objects.mkdir()
        (objects / f"{ref.name}~1").write_bytes(path.read_bytes())
        server = Seed(objects).serve(key=KEY, host="127.0.0.1")
    where = split_address(server.address)
    silent: list[socket.socket] = []
    caplog.set_level(logging.WARNING, logger="stoker.transfer")
    try:
        began = time.monotonic()
        for number in range(HONEST):
            while len(silent) < 40 + number // 10:  # more silent connections open continuously
                silent.append(socket.create_connection(where, source_address=(stranger, 0)))
            fetch.get(ref.name, tmp_path / f"copy-{number}", addresses=[server.address], key=KEY)
        assert time.monotonic() - began < wire.LIMITS.handshake_s * 4, "a fetch waited for strangers to give up"
        assert (tmp_path / f"copy-{HONEST - 1}").read_bytes() == path.read_bytes()
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 4
    finally:
        for sock in silent:
            sock.close()
        server.close()
