"""Embedding many short texts: Stoker's `encoder` in a session, against padding to the maximum and a script that sorts.

Texts have the lengths of tweets: those in STOKER_TRACES/lengths/tweet_token_lengths.csv.gz, else drawn from the
lognormal with their median and 98th percentile. The model has the shape of all-MiniLM-L6-v2 and random weights. Every
side loads first, and is timed from the first text to the last vector, tokenizing included, on the same cores.

*Sorted* is what a good user writes: all texts are tokenized, sorted by length, and padded in batches of 32 to the
longest of each; with two threads, or as two processes of one thread that take every other text, whichever is faster.
*Padded* pads each text to 512 tokens; its rate is taken over fewer texts. Sides: `embeddings_side.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.paired import missing, ratios, run_side
from benchmarks.table import Bar, Line, Table

NAME, TITLE = "embeddings", "embedding texts as long as tweets: Stoker, a script that sorts them, padding to 512"
SIDE = "benchmarks.embeddings_side"


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    """All sides in turn, once a repeat."""
    if why := missing("torch", "transformers"):
        return Table(name=NAME, title=TITLE, skipped=why)
    repeats, texts, padded = (1, 300, 20) if quick else (3, 20_000, 600)
    found: dict[str, list[float]] = {"stoker": [], "sorted": [], "padded": []}
    for repeat in range(repeats):
        for name, rates in found.items():
            count = str(padded if name == "padded" else texts)
            ways = [("--processes", "1"), ("--processes", "2")] if name == "sorted" else [()]
            rates.append(max(run_side(SIDE, name, "--texts", count, *way)["texts_per_s"] for way in ways))
        say(
            f"repeat {repeat + 1} of {repeats}: " + ", ".join(f"{name} {each[-1]:,.0f}" for name, each in found.items())
        )
    lines = [Line(what=name, cells={"texts/s": rates}, digits=0) for name, rates in found.items()]
    for other, least in (("padded", 1.5), ("sorted", 0.95)):
        cells = {"ratio": ratios(found["stoker"], found[other])}
        lines.append(Line(what=f"stoker against {other}", cells=cells, bar=Bar(at_least=least), digits=2))
    return Table(name=NAME, title=TITLE, lines=lines)
