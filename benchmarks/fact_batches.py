"""Calls of 1, 16 and 256 claims over one hot context: with the load out of the way the size of a call should not matter.

The paper's own range is 13.6 % (Pervasive Context Management §4.3). The tensor batch is 1, as there. Sizes take turns in
one session; every run infers the same claims with the same prompt.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import stoker
from benchmarks.paired import spread
from stoker.apps.fact_verification.claims import SAMPLE, read_claims
from stoker.apps.fact_verification.prompts import SHIPPED, read_prompts
from stoker.apps.fact_verification.verify import Question, verify
from stoker.contexts.causal_lm import causal_lm, default_model

SIZES = (1, 16, 256)


def main(claims: int = 1024, runs: int = 3) -> list[tuple[str, str, str, str]]:
    """Rows: size of a call, claims a second, seconds, against the fastest."""
    prompt = read_prompts(SHIPPED)[0]
    everything = itertools.cycle(read_claims(SAMPLE))
    texts = [prompt.fill(claim) for claim in itertools.islice(everything, claims)]
    app = stoker.app(context=causal_lm(default_model()))(verify)
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    with stoker.load():
        list(stoker.map(app, [_question(texts[:2], prompt.answers) for _ in range(16)]))
        for run in range(runs):
            for size in SIZES[run:] + SIZES[:run]:
                calls = [_question(texts[i : i + size], prompt.answers) for i in range(0, claims, size)]
                begun = time.perf_counter()
                made = sum(len(scores.rows) for scores in stoker.map(app, calls))
                seconds[size].append(time.perf_counter() - begun)
                assert made == claims
                print(f"  calls of {size}: {seconds[size][-1]:.1f} s", flush=True)
    fastest = min(statistics.median(taken) for taken in seconds.values())
    return [
        (
            f"calls of {size}",
            spread([claims / s for s in taken], digits=2) + " claims/s",
            spread(taken, digits=1) + " s",
            f"{statistics.median(taken) / fastest:.3f} of the fastest",
        )
        for size, taken in seconds.items()
    ]


def _question(texts: list[str], words: tuple[str, ...]) -> Question:
    return Question(number=0, texts=tuple(texts), words=words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    for row in main(options.claims, options.runs):
        print(" | ".join(row))
