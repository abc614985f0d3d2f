"""Compare the three levels of context awareness of the paper: fact verification with SmolLM2-135M, 16 claims per call.

Numbers are wall-clock times of whole `stoker run fact_verification` processes. FINDINGS.md explains the comparisons.
The side `alone` makes these calls on loaded slots (*inferences alone*).

`fact_batches` compares calls of 1, 16 and 256 claims on one loaded context, in turn in one session. Run times should be
equal (paper §4.3: a difference of 13.6 %).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import stoker
from benchmarks.harness import MODEL, in_turns, need, ratios, run_side, take_turns, until, verify_facts
from benchmarks.tables import Bar, Line, Table
from stoker.apps.common.calls import run_calls
from stoker.apps.fact_verification import options as facts
from stoker.apps.fact_verification.functions import Question, verify
from stoker.apps.fact_verification.options import VerificationOptions, choose_prompts, draw_claims, read_claims
from stoker.apps.fact_verification.run import make_recipe, plan_missing_calls
from stoker.contexts.causal_lm import causal_lm, default_model
from stoker.sessions import facts_of

PROMPTS, BATCH = 3, 16
SIZES = (1, 16, 256)


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL)
    with tempfile.TemporaryDirectory(prefix="awareness-") as place:
        runner = Runner(Path(place), say, home=None if quick else Path(place) / "home")
        if quick:
            lines = alone(runner, limit=2, pairs=1)
        else:
            runner.run("making the snapshot, not counted", 2)
            lines = [
                *alone(runner, limit=300, pairs=3),
                *levels(runner, limit=128, pairs=2, snapshot=True, at_least=2.0),
                *levels(runner, limit=160, pairs=1, snapshot=False, at_least=5.0),
            ]
    return Table(lines=lines)


def batches(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need(*MODEL)
    claims, runs = (8, 1) if quick else (1024, 3)
    found = run_side(time_batches, claims=claims, runs=runs, timeout_s=3600)
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
    return Table(lines=lines)


def alone(runner: Runner, *, limit: int, pairs: int) -> list[Line]:
    sides: dict[str, Callable[[], Any]] = {
        "full": lambda: runner.run("full", limit), "alone": lambda: runner.alone(limit)
    }  # fmt: skip
    found = in_turns(sides, pairs, runner.say)
    full, attempts = [seconds for seconds, _ in found["full"]], [attempt for _, attempt in found["full"]]
    load_s = [attempt["load_device_s"] / attempt["loads"] for attempt in attempts]
    bound = [load + alone_s for load, alone_s in zip(load_s, found["alone"], strict=True)]
    own = [load + one["infer_device_s"] / one["devices"] for load, one in zip(load_s, attempts, strict=True)]
    size = f"{PROMPTS * limit} inferences, {calls_of(limit)} calls, with a snapshot"
    return [
        Line(
            what=what, cells={"full": full, "load + inferences alone": other, "full / that": ratios(full, other)},
            bar=Bar(at_most=1.05), digits=1, last_digits=3,
        )
        for what, other in (
            (f"full, {size}, s", bound), ("the same against a load + its own time in the model, s", own),
        )
    ]  # fmt: skip


def levels(runner: Runner, *, limit: int, pairs: int, snapshot: bool, at_least: float) -> list[Line]:
    more = () if snapshot else ("--no-snapshot",)
    which = "with a snapshot" if snapshot else "GGUF as shipped"
    seconds: dict[str, list[float]] = {"none": [], "full": [], "disk": []}
    for pair in range(pairs):
        sides = {
            level: partial(runner.run, f"{level}, {which}", limit, "--awareness", level, *more)
            for level in (("none", "full", "disk") if snapshot and not pair else ("none", "full"))
        }
        for level, (taken, _) in take_turns(pair, sides).items():
            seconds[level].append(taken)
    size = f"{which}, {PROMPTS * limit} inferences, {calls_of(limit)} calls, s"
    lines = []
    for level, bar in (("none", Bar(at_least=at_least, repeats=1)), ("disk", None)):
        if below := seconds[level]:
            full = seconds["full"][: len(below)]
            cells = {"below full": below, "full": full, "ratio": ratios(below, full)}
            lines.append(Line(what=f"{level} against full, {size}", cells=cells, bar=bar, digits=1))
    return lines


def calls_of(limit: int) -> int:
    return PROMPTS * -(-limit // BATCH)


class Runner:
    def __init__(self, place: Path, say: Callable[[str], None], *, home: Path | None) -> None:
        self.say, self._place, self._home = say, place, home
        self._runs = 0

    def run(self, what: str, limit: int, *arguments: str) -> tuple[float, dict[str, Any]]:
        self._runs += 1
        out = self._place / f"run-{self._runs}"
        size = ("--batch-size", str(BATCH), "--limit", str(limit), "--out", str(out))
        seconds, found = verify_facts(self._place, *size, *arguments, home=self._home)
        attempt: dict[str, Any] = found["attempt"]
        made, expected = attempt["inferences"], PROMPTS * limit
        if made != expected:
            raise RuntimeError(f"{made} inferences were made, not {expected}")
        self.say(f"{what}: {expected} inferences in {seconds:.1f} s, {attempt['loads']} loads")
        return seconds, attempt

    def alone(self, limit: int) -> float:
        environment = {"STOKER_HOME": str(self._home)} if self._home else {}
        found = run_side(infer_alone, limit=limit, folder=self._place, environment=environment)
        return float(found["inferences_s"])


def infer_alone(limit: int) -> dict[str, float]:
    """Make the calls of a run on loaded slots."""
    options = VerificationOptions(limit=limit)
    claims = draw_claims(read_claims(options.claims_path), limit=options.limit, seed=options.seed)
    prompts = choose_prompts(options, claims)
    calls = plan_missing_calls(prompts, claims, {}, batch_size=options.batch_size)  # type: ignore[arg-type]
    questions = [
        Question(
            number=number, prefix=prompt.prefix, texts=tuple(map(prompt.fill, batch)), words=prompt.words,
            tensor_batch=options.tensor_batch,
        )
        for number, (prompt, batch) in enumerate(calls)
    ]  # fmt: skip
    recipe, _ = make_recipe(options)
    scored = verify.with_options(context=recipe)
    with stoker.load() as session:
        ask = facts_of(session, {recipe.key})
        warm = Question(number=0, prefix="", texts=("Is water wet? It is",) * 4, words=(" true", " false"))

        def is_hot() -> bool:
            list(run_calls([(scored, [warm] * 8)]))
            return 0 < ask().devices == ask().hot

        until(is_hot, 600.0, "every slot is hot")
        list(run_calls([(scored, [warm] * 8)]))
        begun = time.perf_counter()
        made = list(run_calls([(scored, questions)]))
        seconds = time.perf_counter() - begun
        known = ask()
    if sorted(scores.number for scores in made) != list(range(len(questions))):
        raise RuntimeError(f"{len(made)} results for {len(questions)} calls")
    if len({scores.worker for scores in made}) != known.devices:
        raise RuntimeError(f"only {len({scores.worker for scores in made})} of {known.devices} slots were used")
    return {"inferences_s": seconds}


def time_batches(claims: int, runs: int) -> dict[str, dict[int, list[float]]]:
    prompt = facts.read_prompts(facts.SHIPPED)[0]
    everything = itertools.cycle(read_claims(facts.SAMPLE))
    texts = [prompt.fill(claim) for claim in itertools.islice(everything, claims)]
    app = verify.with_options(context=causal_lm(default_model()))
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}

    def call(some: list[str]) -> Question:
        return Question(number=0, prefix=prompt.prefix, texts=tuple(some), words=prompt.words)

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
