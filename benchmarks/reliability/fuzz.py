"""`python -m benchmarks.reliability.fuzz`: damaged inputs for every reader of bytes, and random events for the cores.

A reader may raise only its declared errors, within time and memory limits. A file records failures with their inputs
or seeds. Exit status: 0 without failures.
"""

from __future__ import annotations

import argparse
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
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reliability import fuzz_manager, fuzz_pilot
from benchmarks.reliability.fuzz_files import targets
from benchmarks.reliability.fuzz_inputs import Target, damage_bytes

LONGEST_S = 2.0
_MEMORY_BYTES = 3 << 30
_EVERY_S = 20.0
_LIFE_EVERY = 400
"""Number of damaged inputs per new core with random events."""
EVENTS = 200
"""Number of random events of a core."""
LIVES: dict[str, Callable[[random.Random], None]] = {
    "manager core: every message": partial(fuzz_manager.live, count=EVENTS),
    "pilot core: every event": partial(fuzz_pilot.live, count=EVENTS),
}
Counts = dict[str, list[int]]
"""By reader: inputs, refusals, and maximum microseconds."""


def fuzz(
    readers: Sequence[Target], *, count: int, seed: int, found: Callable[[dict[str, Any]], None],
    told: Callable[[int], None] = lambda _: None,
) -> Counts:  # fmt: skip
    """Give `count` damaged inputs to the readers. Call `found` with each input that fails."""
    chance = random.Random(seed)
    deck = [reader for reader in readers for _ in range(reader.share)]
    counts: Counts = {reader.name: [0, 0, 0] for reader in readers}
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


def run_lives(*, count: int, seed: int, found: Callable[[dict[str, Any]], None]) -> Counts:
    counts = {}
    for name, life in LIVES.items():
        for number in range(count):
            try:
                life(random.Random(f"{name} {seed} {number}"))
            except Exception:
                found({"reader": name, "seed": f"{name} {seed} {number}", "wrong": traceback.format_exc(limit=-6)})
        counts[name] = [count * EVENTS, 0, 0]
    return counts


def _work(seed: int, asked: argparse.Namespace) -> tuple[Counts, int, int]:
    """Fuzz in this process. Return the counts, the number of failures, and the peak memory in kB."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable(logging.CRITICAL)
    finds, tell_at, share = 0, time.monotonic() + _EVERY_S, asked.count // asked.processes

    def found(what: dict[str, Any]) -> None:
        nonlocal finds
        finds += 1
        print(f"FOUND in {what['reader']}:\n{what['wrong']}", file=sys.stderr, flush=True)
        with asked.found.open("a") as file:
            file.write(json.dumps({**what, "run": seed}) + "\n")

    def told(done: int) -> None:
        nonlocal tell_at
        if time.monotonic() >= tell_at:
            tell_at += _EVERY_S
            print(f"  seed {seed}: {done:,} of {share:,} inputs, {finds} finds", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as place:
        every = targets(Path(place), seed=seed)
        readers = [reader for reader in every if asked.only in reader.name]
        counts = fuzz(readers, count=share, seed=seed, found=found, told=told)
        if not asked.only:
            counts |= run_lives(count=share // _LIFE_EVERY // len(LIVES), seed=seed, found=found)
    return counts, finds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000_000, help="inputs in all [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random inputs [%(default)s]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="TEXT", help="only readers whose name contains TEXT")
    parser.add_argument("--found", type=Path, default=Path("fuzz-found.jsonl"), help="file for finds [%(default)s]")
    asked = parser.parse_args(arguments)
    began, seeds = time.monotonic(), range(asked.seed, asked.seed + asked.processes)
    with ProcessPoolExecutor(asked.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(partial(_work, asked=asked), seeds))
    total = 0
    for name in sorted(runs[0][0]):
        inputs, refused, longest_us = zip(*(counts[name] for counts, _, _ in runs), strict=True)
        total += sum(inputs)
        took_ms = max(longest_us) / 1e3
        print(f"  {name:42} {sum(inputs):>10,} inputs, {sum(refused):>10,} refused, longest {took_ms:8.1f} ms")
    finds, peak = sum(finds for _, finds, _ in runs), max(peak for _, _, peak in runs)
    print(
        f"{total:,} inputs in {time.monotonic() - began:.0f} s, {asked.processes} processes, seed {asked.seed};"
        f" peak memory {peak / 1024:.0f} MB; {finds} finds"
    )
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
