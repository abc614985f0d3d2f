"""Engines compared: a sweep of mixed output lengths (8 to 128 new tokens, SmolLM2, bfloat16), in tokens a second.

    python -m benchmarks.serving.engines --vllm ENVIRONMENT/bin/python --rounds 5 > engines.json

Each round runs every side once, in a new process: `python -m benchmarks.serving.engines_side`. `--vllm`: an
interpreter with vLLM; `--rows`: of the static batch, of which the best result counts.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.harness import ROOT, machine, output_of, ratios, run_side, spread
from benchmarks.starting import print_side

SIDE = "benchmarks.serving.engines_side"
TITLES = {
    "continuous": "Stoker's continuous engine",
    "static": "Stoker's static engine, at its best number of rows",
    "vllm-script": "vLLM in a script: LLM.generate, compiled or eager",
    "vllm": "Stoker's vLLM engine",
}
RATIOS = (("continuous", "static"), ("continuous", "vllm-script"), ("vllm", "vllm-script"))
_CONVERT = (
    "import torch; from stoker.contexts.causal_lm import default_model;"
    " from stoker.contexts.snapshot import weights_folder;"
    " print(weights_folder(default_model(), dtype=torch.bfloat16)[0])"
)


def sweep(vllm: str = "", rounds: int = 3, requests: int = 96, rows: tuple[int, ...] = (16, 32, 64)) -> dict[str, Any]:
    """Measure every side. Without `vllm`, the sides with vLLM are skipped."""
    reasons = {} if vllm else dict.fromkeys(("vllm-script", "vllm"), "give --vllm")
    found: dict[str, list[float]] = {}
    loads: list[float] = []
    say = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        arguments = ("--model", _convert_model(folder), "--requests", str(requests))
        for number in range(rounds):
            loads.append(round(os.getloadavg()[0], 2))
            for name in (side for side in TITLES if side not in reasons):
                try:
                    rates = [_rate(name, vllm, *arguments, *way) for way in _ways(name, rows)]
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    reasons[name] = str(error)[-600:]
                    found.pop(name, None)
                    continue
                found.setdefault(name, []).append(max(rates))
                say(f"round {number + 1}: {name} {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s")
    for name, several in found.items():
        say(f"{TITLES[name]:52} {spread(several)} tokens/s")
    for above, below in RATIOS:
        if len(found.get(above, ())) == len(found.get(below, ())) > 0:
            say(f"{above} against {below:40} {spread(ratios(found[above], found[below]), digits=2)}")
    for name, reason in reasons.items():
        say(f"{TITLES[name]}: not measured: {reason}")
    return {
        "machine": machine(), "at": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "rounds": rounds,
        "requests": requests, "load": loads, "tokens_per_s": found, "skipped": reasons,
    }  # fmt: skip


def _ways(name: str, rows: Sequence[int]) -> list[list[str]]:
    if name == "static":
        return [["--rows", str(count)] for count in rows]
    return [[], ["--eager"]] if name == "vllm-script" else [[]]


def _rate(name: str, vllm: str, *arguments: str) -> float:
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
    python = vllm if name.startswith("vllm") else sys.executable
    side = run_side(SIDE, name, *arguments, timeout_s=1800, environment=environment, python=python)
    return float(side["tokens"] / side["seconds"])


def _convert_model(folder: str) -> str:
    environment = {**os.environ, "STOKER_SNAPSHOTS": folder, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _CONVERT]
    return output_of(command, timeout_s=300, folder=folder, environment=environment).splitlines()[-1]


if __name__ == "__main__":
    print_side(sweep, __doc__)
