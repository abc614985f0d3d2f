"""A hostile client on the network of the head node: `python -I -S chaos_stranger.py`."""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
MOST = 400
"""Maximum concurrent connections."""


def knock(order: dict, held: list) -> str:
    chance = random.Random(order["seed"])
    try:
        connection = socket.create_connection((order["host"], order["port"]), timeout=0.5)
    except OSError as error:
        return str(error)
    said = {
        "garbage": lambda: chance.randbytes(chance.choice((1, 8, 64, 700, 5000))),
        "flood": lambda: chance.randbytes(1 << 20),
        "silent": lambda: b"",
        "half": lambda: GREETING[: chance.randrange(1, 64)],
        "hello": lambda: GREETING + b"\x04\xc8\x05HELLO\x01\x00" + chance.randbytes(192),
        "reset": lambda: chance.randbytes(chance.randrange(0, 80)),
    }[order["how"]]()
    try:
        connection.sendall(said)
    except OSError:
        pass
    if order["how"] == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    elif order["how"] in ("silent", "half", "hello"):
        held.append((time.monotonic() + order["hold_s"], connection))
    else:
        connection.close()
    return "connected"


def release(held: list) -> None:
    while True:
        time.sleep(0.2)
        now = time.monotonic()
        for each in [each for each in held[:] if each[0] < now or len(held) > MOST]:
            held.remove(each)
            each[1].close()


def main() -> None:
    held: list = []
    threading.Thread(target=release, args=(held,), daemon=True).start()
    for line in sys.stdin:
        sys.stdout.write(knock(json.loads(line), held) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
