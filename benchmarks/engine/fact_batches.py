"""Compare calls of 1, 16 and 256 claims on one loaded context: run times should be equal (paper §4.3: 13.6 %).

Sizes alternate in one session. `python -m benchmarks.engine.fact_batches` runs this side alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import stoker
from benchmarks.harness import MODEL, missing, run_side
from benchmarks.starting import print_side
from benchmarks.tables import Bar, Line, Table
from stoker.apps.fact_verification.functions import Question, verify
from stoker.apps.fact_verification.options import SAMPLE, SHIPPED, read_claims, read_prompts
from stoker.contexts.causal_lm import causal_lm, default_model

NAME, TITLE = "fact_batches", "fact verification in calls of 1, 16 and 256 claims, awareness full, loads excluded"
SIZES = (1, 16, 256)


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing(*MODEL):
        return Table(name=NAME, title=TITLE, skipped=reason)
    claims, runs = (8, 1) if quick else (1024, 3)
    found = run_side("benchmarks.engine.fact_batches", "--claims", str(claims), "--runs", str(runs), timeout_s=3600)
    seconds = {size: found["seconds"][str(size)] for size in SIZES}
    medians = [statistics.median(taken) for taken in seconds.values()]
    lines = []
    for size, taken in seconds.items():
        say(f"calls of {size}: " + ", ".join(f"{one:.1f} s" for one in taken))
        cells = {"seconds": taken, "claims/s": [claims / one for one in taken]}
        lines.append(Line(what=f"{claims:,} claims in calls of {size}", cells=cells, digits=1))
    apart = {"slowest / fastest": [max(medians) / min(medians)]}
    what = "the slowest size against the fastest (medians)"
    lines.append(Line(what=what, cells=apart, bar=Bar(at_most=1.10, repeats=1), last_digits=3))
    return Table(name=NAME, title=TITLE, lines=lines)


def side(claims: int = 1024, runs: int = 3) -> dict[str, dict[int, list[float]]]:
    prompt = read_prompts(SHIPPED)[0]
    everything = itertools.cycle(read_claims(SAMPLE))
    texts = [prompt.fill(claim) for claim in itertools.islice(everything, claims)]
    app = verify.with_options(context=causal_lm(default_model()))
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}

    def call(some: list[str]) -> Question:
        return Question(number=0, prefix=prompt.prefix, texts=tuple(some), words=prompt.answers)

    with stoker.load():
        list(stoker.map(app, [call(texts[:2]) for _ in range(16)]))
        for turn in range(runs):
            for size in SIZES[turn % 3 :] + SIZES[: turn % 3]:
                calls = [call(texts[i : i + size]) for i in range(0, claims, size)]
                begun = time.perf_counter()
                made = sum(len(scores.rows) for scores in stoker.map(app, calls))
                seconds[size].append(time.perf_counter() - begun)
                if made != claims:
                    raise RuntimeError(f"{made} claims came back, not {claims}")
    return {"seconds": seconds}


if __name__ == "__main__":
    print_side(side, __doc__)
