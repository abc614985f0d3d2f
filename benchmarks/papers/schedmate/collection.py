"""Measure the collection for tests of estimates: small recipes of twelve families (`collection.toml`).

`python -m benchmarks.papers.schedmate.collection [--held-out]` measures the collection on this CPU and writes its JSON.
Each recipe runs in a forked process with one thread. Times are the minimum CPU time after a warm-up; memory is the
growth of the process.
"""

from __future__ import annotations

import itertools
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

import msgspec

from benchmarks import corpora
from benchmarks.harness import side_options

SOURCES = "recipe_sources"
A_FAMILY = 9

Sizes = dict[str, tuple[int, ...]]


class Family(msgspec.Struct, frozen=True):
    name: str
    load: Sizes = {}
    run: Sizes = {}
    constants: dict[str, tuple[int, ...]] = {}


class CollectedRecipe(msgspec.Struct, frozen=True):
    name: str
    family: str
    source: str
    load: dict[str, int]
    run: dict[str, int]


FAMILIES = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, tuple[Family, ...]])[
    "family"
]


def recipes(*, held_out: bool = False) -> list[CollectedRecipe]:
    """Return seeded random points of the grid of each family; with `held_out`, points unused for decisions."""
    found, sources = [], corpora.members(SOURCES)
    for family in FAMILIES:
        text = sources[f"{family.name}.py"].decode()
        every = {**family.load, **family.run, **family.constants}
        grid = [dict(zip(every, values, strict=True)) for values in itertools.product(*every.values())]
        drawn = random.Random(family.name).sample(grid, A_FAMILY)
        if held_out:
            others = [sizes for sizes in grid if sizes not in drawn]
            drawn = random.Random(f"{family.name}, held out").sample(others, A_FAMILY)
        for number, sizes in enumerate(drawn):
            source = _with_constants(text, {name: sizes[name] for name in family.constants})
            found.append(
                CollectedRecipe(
                    name=f"{family.name}-{'held-out-' if held_out else ''}{number}",
                    family=family.name,
                    source=source,
                    load={name: sizes[name] for name in family.load},
                    run={name: sizes[name] for name in family.run},
                )
            )
    return found


def _with_constants(text: str, constants: dict[str, int]) -> str:
    lines = text.splitlines(keepends=True)
    for place, line in enumerate(lines):
        for name, value in constants.items():
            for beginning in (f"{name} = ", f"    {name}: int = "):
                if line.startswith(beginning):
                    lines[place] = f"{beginning}{value}\n"
    return "".join(lines)


LOADS, RUNS = 5, 7
LONGEST_S = 1.0
QUIET = Path("/tmp/quiet")
"""While this file exists, another process measures and this process waits."""


def main() -> int:
    held_out = side_options(__doc__, held_out=False).held_out
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401 # use one thread
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.LlamaConfig, transformers.LlamaForCausalLM, transformers.BertModel  # noqa: B018  # lazy imports
    rows = []
    order = recipes(held_out=held_out)
    random.Random(0).shuffle(order)  # Other load on this machine then affects all families equally.
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
        "name": recipe.name, "family": recipe.family, "load": recipe.load, "run": recipe.run, **json.loads(data),
        "source": recipe.source,
    }  # fmt: skip


def _figures(recipe: CollectedRecipe) -> dict[str, float]:
    names: dict[str, Any] = {"__name__": recipe.family}
    sys.modules[recipe.family] = type(sys)(recipe.family)  # required by dataclasses
    exec(compile(recipe.source, f"{recipe.family}.py", "exec"), names)
    before = _resident_bytes("VmRSS")
    context = names["load"](**recipe.load)
    after = _resident_bytes("VmRSS")
    names["run"](context, **recipe.run)
    peak = _resident_bytes("VmHWM")
    loads = _seconds(lambda: names["load"](**recipe.load), LOADS)
    runs = _seconds(lambda: names["run"](context, **recipe.run), RUNS)
    return {
        "load_s": min(loads), "run_s": min(runs), "run_sd": statistics.stdev(runs),
        "resident_bytes": max(0, after - before), "peak_bytes": max(0, peak - before),
    }  # fmt: skip


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
