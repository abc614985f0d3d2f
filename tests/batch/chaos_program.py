"""What the chaos test disturbs: a program on the head that joins a session and maps over numbers until a file appears.

    python chaos_program.py SESSION NAME LOG STOP RESULT

Every few seconds it goes on to another context, whose file has to come to the pilots; some calls have arguments and
results that travel as objects. Programs that run at the same time use the same contexts.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import stoker

session, name, log, stop, result = sys.argv[1:]

ROUND_S = 10.0
"""How long a context is in use."""
FILE_BYTES = 8 << 20
LARGE_BYTES = 3 << 19
"""More than a message carries."""
LARGE_EVERY = 40


@stoker.context(memory="200 MB", files=["path"])
def model(path: str) -> str:
    time.sleep(0.3)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def work(digest: str, item: tuple[int, bytes]) -> tuple[int, str, bytes]:
    number, blob = item
    where = f"{name}-{number} {os.environ['SLURMD_NODENAME']} {os.getpid()}"
    for what, then_s in (("begins", 0.05), ("ends", 0.0)):
        with open(log, "a") as file:
            file.write(f"{where} {what}\n")
        time.sleep(then_s)
    return 3 * number, digest, blob[::-1]


def file_of(turn: int) -> tuple[str, str]:
    """The file of a round, which has the same content for every program, and its digest."""
    content = random.Random(turn).randbytes(FILE_BYTES)
    path = Path(log).with_name(f"model-{turn}-{name}.bin")
    path.write_bytes(content)
    return str(path), hashlib.sha256(content).hexdigest()


def blob_of(number: int) -> bytes:
    """What a call gets beside its number, and gives back turned round."""
    return bytes([number % 256, 1]) * (LARGE_BYTES // 2 if number % LARGE_EVERY == 0 else 1)


def items(number: int, turn: int) -> Iterator[tuple[int, bytes]]:
    while not os.path.exists(stop) and time.time() // ROUND_S == turn:
        yield number, blob_of(number)
        number += 1


def main() -> None:
    calls, wrong = 0, list[int]()
    with stoker.load(session=session, run_dir=str(Path(result).parent / "runinfo")):
        while not os.path.exists(stop):
            turn = int(time.time() // ROUND_S)
            path, digest = file_of(turn)
            app = stoker.app(context=model(path))(work)
            for number, got in enumerate(stoker.map(app, items(calls, turn), window=100), start=calls):
                if got != (3 * number, digest, blob_of(number)[::-1]):
                    wrong.append(number)
                calls = number + 1
    Path(result).write_text(json.dumps({"calls": calls, "wrong": wrong}))


if __name__ == "__main__":
    main()
