"""Engines compared: a sweep of mixed output lengths (8 to 128 new tokens, SmolLM2, bfloat16), in tokens a second.

    python -m benchmarks.serving.engines --vllm ENVIRONMENT/bin/python --rounds 5 --json engines.json

Each round runs every side once, in a new process: `python -m benchmarks.serving.engines_side`. `--vllm`: an
interpreter with vLLM.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import ROOT, machine, output_of, ratios, run_side, spread

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


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--vllm", default="", help="interpreter of an environment with vLLM")
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--requests", type=int, default=96)
    ask.add_argument(
        "--rows", type=int, nargs="+", default=[16, 32, 64], help="rows of the static batch; the best counts"
    )
    ask.add_argument("--model", default="", help="folder of safetensors [the shipped SmolLM2-135M]")
    ask.add_argument("--skip", nargs="*", default=[], choices=TITLES, help="sides to leave out")
    ask.add_argument("--json", type=Path, help="file for all numbers")
    asked = ask.parse_args()
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        found, reasons, loads = _measure(asked, asked.model or _convert_model(folder))
    for name, rates in found.items():
        print(f"{TITLES[name]:52} {spread(rates)} tokens/s")
    for above, below in RATIOS:
        if len(found.get(above, ())) == len(found.get(below, ())) > 0:
            print(f"{above} against {below:40} {spread(ratios(found[above], found[below]), digits=2)}")
    for name, reason in reasons.items():
        print(f"{TITLES[name]}: not measured: {reason}")
    if asked.json:
        record = {
            "machine": machine(), "at": f"{datetime.datetime.now():%Y-%m-%d %H:%M}", "rounds": asked.rounds,
            "requests": asked.requests, "load": loads, "tokens_per_s": found, "skipped": reasons,
        }  # fmt: skip
        asked.json.write_text(json.dumps(record) + "\n")


def _measure(asked: argparse.Namespace, model: str) -> tuple[dict[str, list[float]], dict[str, str], list[float]]:
    found: dict[str, list[float]] = {}
    reasons = dict.fromkeys(asked.skip, "--skip")
    loads: list[float] = []
    if not asked.vllm:
        reasons |= dict.fromkeys(("vllm-script", "vllm"), "give --vllm")
    for number in range(asked.rounds):
        loads.append(round(os.getloadavg()[0], 2))
        for name in (side for side in TITLES if side not in reasons):
            try:
                rates = list(_rates(name, asked=asked, model=model))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                reasons[name] = str(error)[-600:]
                found.pop(name, None)
                continue
            found.setdefault(name, []).append(max(rates))
            print(f"round {number + 1}: {name} {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s", flush=True)
    return found, reasons, loads


def _rates(name: str, *, asked: argparse.Namespace, model: str) -> Iterator[float]:
    python = asked.vllm if name.startswith("vllm") else sys.executable
    environment = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }  # fmt: skip
    ways: list[list[str]] = [["--rows", str(count)] for count in asked.rows] if name == "static" else [[]]
    if name == "vllm-script":
        ways.append(["--eager"])
    for way in ways:
        arguments = [name, "--model", model, "--requests", str(asked.requests), *way]
        side = run_side(SIDE, *arguments, timeout_s=1800, environment=environment, python=python)
        yield side["tokens"] / side["seconds"]


def _convert_model(folder: str) -> str:
    environment = {**os.environ, "STOKER_SNAPSHOTS": folder, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _CONVERT]
    return output_of(command, timeout_s=300, folder=folder, environment=environment).splitlines()[-1]


if __name__ == "__main__":
    main()
