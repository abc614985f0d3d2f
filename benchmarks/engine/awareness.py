"""Compare the three levels of context awareness of the paper: fact verification with SmolLM2-135M, 16 claims per call.

Numbers are wall-clock times of whole `stoker run fact_verification` processes.

1. Full awareness against one load per slot plus the inferences alone. *Inferences alone* are the same calls on
loaded slots, by `python -m benchmarks.engine.awareness --limit 300 [--no-snapshot]`. A second line uses the model
time of the run, divided by the slots.

2. No awareness against full awareness, with the shipped GGUF file (`--no-snapshot`) and with a snapshot.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import stoker
from benchmarks.harness import MODEL, missing, ratios, run_side, side_options, take_turns, verify_facts
from benchmarks.tables import Bar, Line, Table
from stoker.apps.common.calls import run_calls
from stoker.apps.fact_verification.functions import Question, verify
from stoker.apps.fact_verification.options import VerificationOptions, choose_prompts, read_claims, sample_claims
from stoker.apps.fact_verification.run import make_recipe, plan
from stoker.sessions import facts_of

NAME, TITLE = "awareness", "fact verification at the three levels of awareness"
SIDE = "benchmarks.engine.awareness"
PROMPTS, BATCH = 3, 16


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := missing(*MODEL):
        return Table(name=NAME, title=TITLE, skipped=reason)
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
    return Table(name=NAME, title=TITLE, lines=lines)


def alone(runner: Runner, *, limit: int, pairs: int) -> list[Line]:
    full: list[float] = []
    bound: list[float] = []
    own: list[float] = []
    for pair in range(pairs):
        sides: dict[str, Callable[[], Any]] = {
            "full": lambda: runner.run("full", limit), "alone": lambda: runner.alone(limit)
        }  # fmt: skip
        found = take_turns(pair, sides)
        (seconds, attempt), alone_s = found["full"], found["alone"]
        load_s = attempt["load_device_s"] / attempt["loads"]
        runner.say(f"load {load_s:.1f} s, inferences alone {alone_s:.1f} s")
        full.append(seconds)
        bound.append(load_s + alone_s)
        own.append(load_s + attempt["infer_device_s"] / attempt["devices"])
    size = f"{PROMPTS * limit} inferences, {calls_of(limit)} calls, with a snapshot"
    lines = []
    for what, other, bar in (
        (f"full, {size}, s", bound, Bar(at_most=1.05)),
        ("the same against a load + its own time in the model, s", own, Bar(at_most=1.05)),
    ):
        cells = {"full": full, "load + inferences alone": other, "full / that": ratios(full, other)}
        lines.append(Line(what=what, cells=cells, bar=bar, digits=1, last_digits=3))
    return lines


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
    bar = Bar(at_least=at_least, repeats=1)
    lines = []
    for level in ("none", "disk"):
        if seconds[level]:
            full = seconds["full"][: len(seconds[level])]
            cells = {"below full": seconds[level], "full": full, "ratio": ratios(seconds[level], full)}
            lines.append(
                Line(what=f"{level} against full, {size}", cells=cells, bar=bar if level == "none" else None, digits=1)
            )
    return lines


def calls_of(limit: int) -> int:
    return PROMPTS * -(-limit // BATCH)


class Runner:
    def __init__(self, place: Path, say: Callable[[str], None], *, home: Path | None) -> None:
        self.say = say
        self._place = place
        self._runs = 0
        self._home = home

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
        found = run_side(SIDE, "--limit", str(limit), folder=self._place, environment=environment)
        return float(found["inferences_s"])


def main() -> None:
    asked = side_options(__doc__, limit=300, no_snapshot=False)
    options = VerificationOptions(limit=asked.limit, snapshot=not asked.no_snapshot)
    claims = sample_claims(read_claims(options.claims_path), limit=options.limit, seed=options.seed)
    calls = plan(choose_prompts(options, claims), claims, {}, batch_size=options.batch_size)  # type: ignore[arg-type]
    questions = [
        Question(
            number=number, prefix=call.prompt.prefix, texts=tuple(call.prompt.fill(claim) for claim in call.claims),
            words=call.prompt.answers, tensor_batch=options.tensor_batch,
        )
        for number, call in enumerate(calls)
    ]  # fmt: skip
    recipe, _ = make_recipe(options)
    scored = verify.with_options(context=recipe)
    with stoker.load() as session:
        ask = facts_of(session, {recipe.key})
        warm = Question(number=0, prefix="", texts=("Is water wet? It is",) * 4, words=(" true", " false"))
        until = time.monotonic() + 600
        while not 0 < ask().devices == ask().hot:
            list(run_calls([(scored, [warm] * 8)]))
            if time.monotonic() > until:
                raise RuntimeError(f"not every slot became hot: {ask()}")
        list(run_calls([(scored, [warm] * 8)]))
        begun = time.perf_counter()
        made = list(run_calls([(scored, questions)]))
        seconds = time.perf_counter() - begun
        facts = ask()
    if sorted(scores.number for scores in made) != list(range(len(questions))):
        raise RuntimeError(f"{len(made)} results for {len(questions)} calls")
    if len({scores.worker for scores in made}) != facts.devices:
        raise RuntimeError(f"only {len({scores.worker for scores in made})} of {facts.devices} slots were used")
    print(json.dumps({
        "inferences_s": seconds,
        "infer_device_s": sum(scores.infer_s for scores in made),
        "load_s": facts.load_s,
        "calls": len(questions),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
