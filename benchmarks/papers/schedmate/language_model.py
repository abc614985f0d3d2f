"""`python -m benchmarks.papers.schedmate.language_model URL MODEL`: compare rules with and without a language model.

*Lines*: the ten held-out formats are read by the rules, by rules and model, and by the model alone (as for formats that
no rule matches). *Failures*: the 308 logs of the test part, with all shipped rules and without rules that match their
texts. In both comparisons, correct answers in place of model answers give an upper limit.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import Clock
from benchmarks.papers.schedmate.failures import evaluation
from benchmarks.papers.schedmate.failures.corpus import FailedJob, corpus
from benchmarks.papers.schedmate.metric_formats import HELD_OUT, HELD_OUT_SECOND
from benchmarks.papers.schedmate.metrics import Learned, made_cases, rows_of
from stoker.manager.advice.endpoint import ModelEndpoint
from stoker.manager.advice.logs import Fault, FaultKind, LocatedFailure
from stoker.manager.advice.logs.opinion import BLAMED_BY_MODEL, ask_second_opinion
from stoker.manager.advice.logs.reading import RANK_MARK
from stoker.manager.advice.metrics import LineFormats
from stoker.site import Advice, Duration

TABLES = ("without rows that know the test's texts", "shipped table")
_BY_HAND = tuple(map(re.compile, tomllib.loads(Path(__file__).with_name("line_answers.toml").read_text())["lines"]))


class Remembering(ModelEndpoint):
    def __init__(self, model: Advice) -> None:
        super().__init__(model)
        self.answers: dict[str, dict[str, object]] = {}

    def ask(self, instruction: str, question: str, *, schema: Mapping[str, object]) -> dict[str, object]:
        if question not in self.answers:
            self.answers[question] = super().ask(instruction, question, schema=schema)
        return self.answers[question]


class ByHand(ModelEndpoint):
    """A model endpoint that gives the correct answers for the held-out formats (`line_answers.toml`)."""

    def __init__(self) -> None:
        super().__init__(Advice("http://127.0.0.1:9/v1", "by hand"))

    def ask(self, instruction: str, question: str, *, schema: Mapping[str, object]) -> dict[str, object]:  # noqa: ARG002
        found = next((hit for each in _BY_HAND if (hit := each.search(question))), None)
        return dict(found.groupdict()) if found is not None else {}


def lines(endpoint: ModelEndpoint) -> dict[str, Any]:
    cases = list(made_cases(HELD_OUT | HELD_OUT_SECOND))
    found: dict[str, Any] = {}
    readers = {
        "rules": None, "rules and model": Learned(LineFormats(), endpoint),
        "model alone": Learned(LineFormats(rules=lambda _: None), endpoint),
        "right answers alone": Learned(LineFormats(rules=lambda _: None), ByHand()),
    }  # fmt: skip
    for name, learned in readers.items():
        found[name] = rows_of(cases, learned)
        if learned is not None:
            found[name]["formats learned"] = learned.formats.learned_count
        rows = found[name]["all"]
        print(f"{name}: found {rows['found']:.1%}, right {rows['right']:.1%}", flush=True)
    return found


def failures(endpoint: ModelEndpoint) -> dict[str, Any]:
    """Return the scores of the 308 logs. Failures with an equal start share one question to the model."""
    jobs = list(corpus(test=True))
    opinions: dict[str, Fault] = {}
    counts = {"doubted": 0, "believed": 0}

    def model(_: FailedJob, located: LocatedFailure, fault: Fault) -> Fault:
        texts = [located.first.text, *(line.text for line in located.traceback[-1:])]
        key = re.sub(r"\d+", "#", " | ".join(RANK_MARK.sub("", text) for text in texts))
        if key not in opinions:
            opinions[key] = ask_second_opinion(located, fault, endpoint)
        counts["doubted"] += 1
        given = opinions[key]
        if not given.means.startswith(BLAMED_BY_MODEL):
            return fault
        counts["believed"] += 1
        return given

    def always_right(job: FailedJob, _: LocatedFailure, fault: Fault) -> Fault:
        return msgspec.structs.replace(fault, kind=FaultKind(job.kind))

    found: dict[str, Any] = {}
    tables = evaluation.tables(jobs)
    for name in TABLES:
        counts.update(doubted=0, believed=0)
        opinions_by_name = {"rules": None, "rules and model": model, "an opinion that is always right": always_right}
        scores = {
            which: evaluation.score_verdicts(jobs, tables[name], opinion=opinion)
            for which, opinion in opinions_by_name.items()
        }
        found[name] = scores | counts
        for which, each in scores.items():
            print(f"{name}, {which}: F1 {each['f1']}, precision {each['precision']}", flush=True)
    return found | {"questions": len(opinions)}


def main() -> int:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.schedmate.language_model", description=__doc__)
    ask.add_argument("url", help="an OpenAI-compatible endpoint, for example of `stoker serve`")
    ask.add_argument("model", help="the model at the endpoint")
    asked = ask.parse_args()
    model = Advice(asked.url, asked.model, time_limit_s=Duration(300.0), session_tokens=10_000_000)
    endpoint = Remembering(model)
    clock = Clock(f"python -m benchmarks.papers.schedmate.language_model URL {asked.model}")
    began = time.monotonic()
    record: dict[str, Any] = {"model": asked.model, "lines": lines(endpoint)}
    record["tokens of lines"] = endpoint.model.session_tokens - endpoint.tokens_left
    record["failures"] = failures(endpoint)
    record["tokens"] = endpoint.model.session_tokens - endpoint.tokens_left
    record["s"] = round(time.monotonic() - began)
    clock.write("schedmate-language-model", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
