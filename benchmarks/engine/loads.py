"""Measure the wait of the first call of a context in a session of one pilot; `benchmarks.before` runs this side.

    python -m benchmarks.engine.loads cold      every context fits on the device
    python -m benchmarks.engine.loads evict     one context fits: each load evicts the context before it

Prints the median seconds from submission to result as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil

import stoker
from benchmarks.harness import side_options, verify_facts

SITE = 'name = "one"\n[provider]\nkind = "local"\n[pilot]\ndevices = "cpu:1"\nmax_blocks = 1\n'
FILE_BYTES = 1 << 20
WARM_UP = 3


def size_of(data: bytes, number: int) -> int:
    return len(data) + number


def first_call(folder: Path, number: int, *, evict: bool) -> float:
    whole = psutil.virtual_memory().total
    memory = f"{int(0.6 * whole / 1e6) if evict else 20} MB"  # Only a declared limit; no context uses this memory.
    file = folder / f"weights-{number}"
    file.write_bytes(os.urandom(FILE_BYTES))

    @stoker.context(memory=memory, files=["path"])
    def weights(path: str) -> bytes:
        with open(path, "rb") as opened:
            return opened.read()

    app = stoker.app(context=weights(str(file)))(size_of)
    start = time.perf_counter()
    assert app(number).result() == FILE_BYTES + number
    return time.perf_counter() - start


def measure(*, evict: bool, contexts: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="loads-") as folder:
        site = Path(folder) / "one.toml"
        site.write_text(SITE)
        with stoker.load(str(site)):
            seconds = [first_call(Path(folder), number, evict=evict) for number in range(contexts + WARM_UP)]
    return seconds[WARM_UP:]


def demo(claims: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="facts-") as folder:
        seconds, found = verify_facts(Path(folder), "--limit", str(claims), "--out", str(Path(folder) / "out"))
    return {"seconds": seconds, "claims": claims, "verdicts": [prompt["confusion"] for prompt in found["prompts"]]}


def main() -> None:
    asked = side_options(__doc__, case=("cold", "evict", "demo"), contexts=25, claims=900)
    if asked.case == "demo":
        print(json.dumps(demo(asked.claims)))
        return
    seconds = measure(evict=asked.case == "evict", contexts=asked.contexts)
    print(json.dumps({"seconds": statistics.median(seconds), "all": [round(each, 4) for each in seconds]}))


if __name__ == "__main__":
    main()
