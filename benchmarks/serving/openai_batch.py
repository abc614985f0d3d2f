"""Measure `stoker batch` on two pilots of this machine, while the manager and each pilot are killed once.

*Useful* is the device time of the requests without kills, divided by the pilot-seconds of the run with kills until the
last answer. The side fails unless each `custom_id` has one answer, and both runs give equal answers except for
rounding.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
from tiny_model import write_tiny_model

from benchmarks.harness import need, numbers_of, processes, run_side
from benchmarks.starting import STOKER
from benchmarks.tables import Bar, Line, Table

PILOTS = 2
SITE = f'[pilot]\ndevices = "cpu:1"\ninit_blocks = {PILOTS}\nmax_blocks = {PILOTS}\n'
PILOT, MANAGER = "stoker.pilot.main", "stoker.manager.main"
LIMIT_S = 3600.0


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need("torch", "transformers")
    requests = 150 if quick else 20_000
    run = run_side(side, requests=requests, timeout_s=3600)
    say(numbers_of(run))
    names = {"s": "seconds", "pilot-seconds": "pilot_s", "requests/s of a device": "per_device_s", "useful": "useful"}
    cells = {heading: [run[name]] for heading, name in names.items()}
    what = f"{requests:,} requests of 16 to 48 tokens, two pilots and the manager killed"
    return Table(lines=[Line(what=what, cells=cells, bar=Bar(at_least=0.85, repeats=1))])


def side(requests: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="batch-") as place:
        folder = Path(place)
        write_tiny_model(folder / "tiny")
        (folder / "site.toml").write_text(SITE)
        with (folder / "requests.jsonl").open("w") as file:
            for number in range(requests):
                body = {"model": "m", "prompt": f"Number {number} is", "max_tokens": 16 + number % 33, "seed": number}
                line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(line) + "\n")
        calm = run(folder, "calm", total=requests, kills=False)
        disturbed = run(folder, "disturbed", total=requests, kills=True)
        one, other = answers(folder / "calm"), answers(folder / "disturbed")
        # Batches are random, and rounding decides between equally likely tokens.
        if sum(a != b for a, b in zip(one, other, strict=True)) > 0.002 * requests:
            raise SystemExit("the two runs have other answers")
        each = Counter(line.partition(" ")[0] for line in other)
        if len(each) != requests or max(each.values()) > 1:
            raise SystemExit(f"{len(each)} of {requests} requests are answered, one {max(each.values())} times")
    per_device_s = calm["per_s"] / PILOTS
    return {
        "useful": requests / per_device_s / disturbed["pilot_s"], "pilot_s": disturbed["pilot_s"],
        "seconds": disturbed["seconds"], "per_device_s": per_device_s,
    }  # fmt: skip


def answers(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    return [f"{line['custom_id']} {line['response']['body']['choices']}" for line in lines]


def run(folder: Path, name: str, *, total: int, kills: bool) -> dict[str, float]:
    command = [*STOKER, "batch", "requests.jsonl", "--model", "tiny", "--site", "site.toml", "--out", name]
    with (folder / f"{name}.log").open("w") as log:
        batch = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            found = watch(batch, folder, folder / name / "results.jsonl.part", total=total, kills=kills)
            code = batch.wait(120)
        finally:
            batch.kill()
    if code:
        raise SystemExit(f"stoker batch ended with {code}:\n{(folder / f'{name}.log').read_text()[-4000:]}")
    return found


def watch(batch: subprocess.Popen[bytes], folder: Path, part: Path, *, total: int, kills: bool) -> dict[str, float]:
    """Add up the pilots' seconds until the last answer; with `kills`, kill a pilot, the manager and the other pilot.

    `per_s`: answers per second between 10 and 90 % of the requests.
    """
    began = last = time.monotonic()
    pilot_s, done = 0.0, 0
    pilots: dict[int, psutil.Process] = {}
    marks: list[tuple[float, int]] = []
    plan = [(0.25, PILOT), (0.5, MANAGER), (0.75, PILOT)] if kills else []
    first: list[psutil.Process] = []  # The first pilots; each pilot will be killed.
    while batch.poll() is None and done < total:
        if time.monotonic() - began > LIMIT_S:
            raise SystemExit(f"{done} of {total} requests were answered within {LIMIT_S:g} s")
        time.sleep(0.2)
        now, done = time.monotonic(), part.read_bytes().count(b"\n") if part.exists() else 0
        pilot_s += (now - last) * sum(is_alive(pilot) for pilot in pilots.values())
        last = now
        for process in processes(PILOT, folder, besides=pilots):
            pilots[process.pid] = process
            pilot_s += time.time() - process.create_time()
        if done >= (0.9 if marks else 0.1) * total and len(marks) < 2:
            marks.append((now, done))
        if plan and done >= plan[0][0] * total:
            _, module = plan.pop(0)
            first = first or list(pilots.values())
            (first.pop() if module == PILOT else next(iter(processes(MANAGER, folder)))).kill()
    if plan:
        raise SystemExit(f"{len(plan)} of {PILOTS + 1} processes were not killed")
    (from_s, had), (to_s, has) = marks if len(marks) == 2 else ((began, 0), (last, done))
    return {"pilot_s": pilot_s, "seconds": last - began, "per_s": (has - had) / (to_s - from_s)}


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
