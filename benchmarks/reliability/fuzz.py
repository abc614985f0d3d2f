"""`python -m benchmarks.reliability.fuzz`: damaged inputs for every reader of bytes, and random events for the cores.

A reader may raise only its declared errors, within time and memory limits. A file records failures with seeds;
`--again FILE` repeats these failures. Exit status: 0 without failures.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reliability import fuzz_manager, fuzz_pilot
from benchmarks.reliability.fuzz_files import targets
from benchmarks.reliability.fuzz_inputs import Target, damage_bytes

LONGEST_S = 2.0
_MEMORY_BYTES = 3 << 30
_EVERY_S = 20.0
_FOUND_MOST = 20
_LIFE_EVERY = 400
"""Number of damaged inputs per new core with random events."""
EVENTS = 200
"""Number of random events of a core."""
LIVES: dict[str, Callable[[random.Random], None]] = {
    "manager core: every message": partial(fuzz_manager.live, count=EVENTS),
    "pilot core: every event": partial(fuzz_pilot.live, count=EVENTS),
}


def fuzz(
    readers: Sequence[Target], *, count: int, seed: int, found: Callable[[dict[str, Any]], None],
    told: Callable[[int], None] = lambda _: None,
) -> dict[str, list[int]]:  # fmt: skip
    """Give `count` damaged inputs to the readers. Return for each reader: inputs, refusals, and maximum microseconds.

    `found` is called with each failed input.
    """
    chance = random.Random(seed)
    deck = [reader for reader in readers for _ in range(reader.share)]
    counts: dict[str, list[int]] = {reader.name: [0, 0, 0] for reader in readers}
    for number in range(count):
        reader = deck[int(chance.random() * len(deck))]
        data = damage_bytes(chance, chance.choice(reader.right), reader.right)
        began = time.perf_counter()
        line = counts[reader.name]
        wrong = ""
        try:
            reader.read(data)
        except reader.declared:
            line[1] += 1
        except Exception:
            wrong = traceback.format_exc(limit=-6)
        took_s = time.perf_counter() - began
        line[0] += 1
        line[2] = max(line[2], int(took_s * 1e6))
        if wrong or took_s > LONGEST_S:
            found({"reader": reader.name, "data": data.hex(), "wrong": wrong or f"took {took_s:.1f} s"})
        if number % 1000 == 999:
            told(number + 1)
    return counts


def run_lives(*, count: int, seed: int, found: Callable[[dict[str, Any]], None]) -> dict[str, list[int]]:
    counts = {}
    for name, life in LIVES.items():
        for number in range(count):
            try:
                life(random.Random(f"{name} {seed} {number}"))
            except Exception:
                found({"reader": name, "seed": f"{name} {seed} {number}", "wrong": traceback.format_exc(limit=-6)})
        counts[name] = [count * EVENTS, 0, 0]
    return counts


def _work(number: int, asked: argparse.Namespace, say: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.CRITICAL)
    seed = asked.seed + number
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        every = targets(Path(place), seed=seed, recorded=asked.journal)
        readers = [reader for reader in every if asked.only in reader.name]
        share = asked.count // asked.processes

        def found(what: dict[str, Any]) -> None:
            say.put({**what, "run": seed})

        counts = fuzz(readers, count=share, seed=seed, found=found, told=lambda done: say.put((number, done)))
        if not asked.only:
            counts |= run_lives(count=share // _LIFE_EVERY // len(LIVES), seed=seed, found=found)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    say.put((number, counts, peak))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000_000, help="inputs in all [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random inputs [%(default)s]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="TEXT", help="only readers whose name contains TEXT")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="journal of a real session, to damage as well")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found.jsonl"), help="file for finds [%(default)s]")
    parser.add_argument("--again", type=Path, metavar="FILE", help="read only the finds of this file again")
    asked = parser.parse_args(arguments)
    if asked.again is not None:
        return _repeat_input(asked)
    began = time.monotonic()
    start = multiprocessing.get_context("spawn")
    say = start.Queue()
    workers = [start.Process(target=_work, args=(number, asked, say)) for number in range(asked.processes)]
    for worker in workers:
        worker.start()
    counts, finds, peak = _listen(say, workers, asked, began)
    for worker in workers:
        worker.join()
    for name, (inputs, refused, longest_us) in sorted(counts.items()):
        print(f"  {name:42} {inputs:>10,} inputs, {refused:>10,} refused, longest {longest_us / 1e3:8.1f} ms")
    total = sum(inputs for inputs, _, _ in counts.values())
    dead = [str(worker.exitcode) for worker in workers if worker.exitcode]
    print(
        f"{total:,} inputs in {time.monotonic() - began:.0f} s, {asked.processes} processes, seed {asked.seed};"
        f" peak memory {peak / 1024:.0f} MB; {finds} finds{f'; workers died: {dead}' if dead else ''}"
    )
    return 1 if finds or dead else 0


def _listen(
    say: Any, workers: Sequence[Any], asked: argparse.Namespace, began: float
) -> tuple[dict[str, list[int]], int, int]:
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    done = dict.fromkeys(range(len(workers)), 0)
    left, finds, peak, tell_at = len(workers), 0, 0, began + _EVERY_S
    while left and (any(worker.is_alive() for worker in workers) or not say.empty()):
        try:
            said = say.get(timeout=1.0)
        except Exception:  # No message arrived.
            continue
        if isinstance(said, dict):
            finds += 1
            if finds <= _FOUND_MOST:
                print(f"FOUND in {said['reader']}:\n{said['wrong']}", file=sys.stderr, flush=True)
            with asked.found.open("a") as file:
                file.write(json.dumps(said) + "\n")
        elif len(said) == 2:
            done[said[0]] = said[1]
        else:
            left -= 1
            peak = max(peak, said[2])
            for name, (inputs, refused, longest) in said[1].items():
                line = counts[name]
                counts[name] = [line[0] + inputs, line[1] + refused, max(line[2], longest)]
        if time.monotonic() >= tell_at:
            tell_at += _EVERY_S
            rate = sum(done.values()) / (time.monotonic() - began)
            print(f"  {sum(done.values()):,} inputs, {rate:,.0f} a second, {finds} finds", file=sys.stderr, flush=True)
    return counts, finds, peak


def _repeat_input(asked: argparse.Namespace) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        readers = {reader.name: reader for reader in targets(Path(place), seed=asked.seed)}
        for line in asked.again.read_text().splitlines():
            find = json.loads(line)
            reader = readers.get(find["reader"])
            if reader is None or "data" not in find:
                continue
            try:
                reader.read(bytes.fromhex(find["data"]))
            except reader.declared:
                continue
            except Exception:
                wrong += 1
                print(f"still wrong in {reader.name}:\n{traceback.format_exc(limit=-6)}")
    print(f"{wrong} of them are still wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
