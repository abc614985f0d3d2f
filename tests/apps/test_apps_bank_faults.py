from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from stoker.tuning.bank.build import ensure_bank
from stoker.tuning.bank.candidates import Candidate, hash_prompt
from stoker.tuning.bank.store import open_bank

OF = {"model": "model-a"}

INSERT = """
import sys
from pathlib import Path
import numpy as np
from stoker.tuning.bank.build import insert
from stoker.tuning.bank.candidates import Candidate
from stoker.tuning.bank.store import open_bank

folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
bank = open_bank(folder, model="model-a")
print("open", flush=True)
sys.stdin.readline()
for number in range(count):
    text = f"{name} {number} " + "x" * 3000
    insert(bank, Candidate(text=text, task=name), read=lambda texts: np.full((1, 8), number % 7, dtype=np.float32))
    print(number, flush=True)
"""

BUILD = """
import sys, time
from pathlib import Path
import numpy as np
from stoker.tuning.bank.build import ensure_bank
from stoker.tuning.bank.candidates import Candidate

def read(texts):
    print(len(texts), flush=True)
    sys.stdin.readline()
    time.sleep(0.05)
    return np.array([[int(text) % 11, int(text) % 7] for text in texts], dtype=np.float32)

prompts = [Candidate(text=str(number)) for number in range(640)]
bank = ensure_bank(Path(sys.argv[1]), prompts, model="model-a", read=read, k=5)
print("bank", len(bank.layers), flush=True)
"""


def start(program: str, *arguments: str, stdin: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=stdin, stdout=subprocess.PIPE, text=True)


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def made(folder: Path) -> None:
    rng = np.random.default_rng(1)
    prompts = [Candidate(text=f"prompt {number}") for number in range(20)]
    ensure_bank(folder, prompts, read=lambda texts: rng.random((len(texts), 8)).astype(np.float32), k=4, **OF)


def test_kill_during_insertions_loses_no_reported_prompt(tmp_path):
    made(tmp_path)
    told: set[str] = set()
    rng = np.random.default_rng()
    for turn in range(3):
        process = start(INSERT, str(tmp_path), f"turn{turn}", "100000")
        assert line(process) == "open"
        go(process)
        assert line(process) == "0"
        time.sleep(float(rng.uniform(0, 0.15)))
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        rest = process.stdout.read()  # `communicate` would lose the text that `line` has already read into the buffer
        process.wait(60)
        numbers = [0, *(int(one) for one in rest.split("\n")[:-1])]
        assert numbers == list(range(len(numbers)))
        told |= {hash_prompt(f"turn{turn} {number} " + "x" * 3000) for number in numbers}
        bank = open_bank(tmp_path, **OF)
        assert told <= set(bank.layers.candidates)
        assert len(told) + 20 <= len(bank.layers) <= len(told) + 20 + turn + 1
        assert sum(map(len, bank.layers.clusters)) == len(bank.layers)
    # The lock is free, and a dead writer's files do not disturb later writers.
    assert bank.insert(Candidate(text="after all"), np.ones(8, dtype=np.float32)).did.value == "added"
    assert open_bank(tmp_path, **OF).layers.clusters == bank.layers.clusters
    assert not list(tmp_path.glob("*.damaged-*"))


def test_concurrent_insertions_of_the_same_prompts_store_each_once(tmp_path):
    made(tmp_path)
    processes = [start(INSERT, str(tmp_path), "same", "30") for _ in range(2)]
    for process in processes:
        assert line(process) == "open"
    for process in processes:
        go(process)
    for process in processes:
        _, _ = process.communicate(timeout=120)
        assert process.returncode == 0
    layers = open_bank(tmp_path, **OF).layers
    everyone = [key for members in layers.clusters for key in members]
    assert len(everyone) == len(set(everyone)) == len(layers) == 20 + 30
    assert {hash_prompt(f"same {number} " + "x" * 3000) for number in range(30)} <= set(everyone)


def test_killed_build_continues_and_two_builders_make_one_bank(tmp_path):
    process = start(BUILD, str(tmp_path))
    for _ in range(2):
        assert line(process) == "64"
        go(process)
    assert line(process) == "64"  # without another `go`, the builder waits here until the kill
    process.kill()
    process.communicate(timeout=60)
    builders = [start(BUILD, str(tmp_path), stdin=subprocess.DEVNULL) for _ in range(2)]
    said = [builder.communicate(timeout=120)[0].split() for builder in builders]
    assert all(one[-2:] == ["bank", "640"] for one in said)
    read = sorted(len(one) - 2 for one in said)
    assert read[0] == 0  # one builder scored no pass, because it waited for the other builder
    assert read[1] == 8  # the killed builder had stored two of ten passes, so eight passes remain
