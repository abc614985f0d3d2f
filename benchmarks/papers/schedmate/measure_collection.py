"""`python -m benchmarks.papers.schedmate.measure_collection [--held-out]`: run the collection on this CPU and write
its JSON.

Each recipe runs in a process of its own, forked from one that has imported what all import; one thread. Times are the
least CPU time of several loads and runs after one to warm up (the machine is shared, and one thread that only computes
takes as long on an idle one); memory is what the process grew by.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import corpora
from benchmarks.papers.schedmate.collection import CollectedRecipe, recipes

LOADS, RUNS = 5, 7
LONGEST_S = 1.0
QUIET = Path("/tmp/quiet")
"""While this file is there, somebody else on this machine measures."""


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401  # with one thread from its import on
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.LlamaConfig, transformers.LlamaForCausalLM, transformers.BertModel  # noqa: B018  # imported lazily
    rows, held_out = [], "--held-out" in sys.argv[1:]
    order = recipes(held_out=held_out)
    random.Random(0).shuffle(order)  # so that what else runs here falls on all families alike
    for recipe in order:
        while QUIET.exists():
            time.sleep(5)
        row = _measured(recipe)
        sys.stderr.write(f"{recipe.name}: load {row['load_s'] * 1e3:.1f} ms, run {row['run_s'] * 1e3:.1f} ms\n")
        if row["run_s"] > LONGEST_S:
            sys.stderr.write(f"{recipe.name} is left out: it runs longer than {LONGEST_S:g} s\n")
            continue
        rows.append(row)
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    name = f"collection{'_held_out' if held_out else ''}.json"
    corpora.write(name, json.dumps({"machine": machine, "recipes": rows}, indent=1).encode() + b"\n")
    return 0


def _measured(recipe: CollectedRecipe) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, json.dumps(_figures(recipe)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return {
        "name": recipe.name,
        "family": recipe.family,
        "load": recipe.load,
        "run": recipe.run,
        **json.loads(data),
        "source": recipe.source,
    }


def _figures(recipe: CollectedRecipe) -> dict[str, float]:
    names: dict[str, Any] = {"__name__": recipe.family}
    sys.modules[recipe.family] = type(sys)(recipe.family)  # dataclasses ask for it
    exec(compile(recipe.source, f"{recipe.family}.py", "exec"), names)
    before = _resident_bytes("VmRSS")
    context = names["load"](**recipe.load)
    after = _resident_bytes("VmRSS")
    names["run"](context, **recipe.run)
    peak = _resident_bytes("VmHWM")
    loads = _seconds(lambda: names["load"](**recipe.load), LOADS)
    runs = _seconds(lambda: names["run"](context, **recipe.run), RUNS)
    return {
        "load_s": min(loads),
        "run_s": min(runs),
        "run_sd": statistics.stdev(runs),
        "resident_bytes": max(0, after - before),
        "peak_bytes": max(0, peak - before),
    }


def _seconds(work: Callable[[], Any], times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return found


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
