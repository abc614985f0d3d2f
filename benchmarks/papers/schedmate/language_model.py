"""`python -m benchmarks.papers.schedmate.language_model URL MODEL`: what a language model adds to the rules.

*Lines* are those of the ten held-out formats, read by the rules, by the rules with the model, and by the model alone as
for formats that no rule knows. *Failures* are the 308 logs of the test part, without the rules that know their texts.
Each part is also scored with an opinion that is always right, which shows how much the rules leave to a model. Without
URL and MODEL only the scores without a model are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import msgspec

from benchmarks.harness import ROOT, commit, machine
from benchmarks.papers.schedmate.failures import evaluation
from benchmarks.papers.schedmate.failures.corpus import FailedJob, corpus
from benchmarks.papers.schedmate.metric_formats import HELD_OUT, HELD_OUT_SECOND
from benchmarks.papers.schedmate.metrics import Learned, made_cases, rows_of
from stoker.manager.advice.endpoint import Endpoint, LanguageModel
from stoker.manager.advice.logs import Fault, FaultKind, Located
from stoker.manager.advice.logs.opinion import BY_MODEL, second_opinion
from stoker.manager.advice.metrics import LineFormats
from stoker.whole_files import write_whole

RECORD = ROOT / "benchmarks" / "records" / "schedmate-language-model.json"
TABLES = ("without rows that know the test's texts", "shipped table")


def lines(endpoint: Endpoint | None) -> dict[str, Any]:
    """Return the scores of the ten held-out formats."""
    cases = list(made_cases(HELD_OUT | HELD_OUT_SECOND))
    found: dict[str, Any] = {"rules": rows_of(cases, "")}
    if endpoint is not None:
        for name, rules in (("rules and model", None), ("model alone", lambda _: None)):
            formats = LineFormats() if rules is None else LineFormats(rules=rules)
            found[name] = rows_of(cases, "", Learned(formats, endpoint)) | {"formats learned": formats.learned}
    for name, rows in found.items():
        print(f"{name}: found {rows['all']['found']:.1%}, right {rows['all']['right']:.1%}", flush=True)
    return found


def failures(endpoint: Endpoint | None) -> dict[str, Any]:
    """Return the scores of the 308 logs."""
    jobs = list(corpus(test=True))
    asked = believed = 0

    def model(_: FailedJob, located: Located, fault: Fault) -> Fault:
        nonlocal asked, believed
        given = second_opinion(located, fault, endpoint) if endpoint is not None else fault
        asked, believed = asked + 1, believed + given.means.startswith(BY_MODEL)
        return given

    def always_right(job: FailedJob, _: Located, fault: Fault) -> Fault:
        return msgspec.structs.replace(fault, kind=FaultKind(job.kind))

    found: dict[str, Any] = {}
    tables = evaluation.tables(jobs)
    for name in TABLES:
        scores = {"rules": evaluation.scored(jobs, tables[name])}
        asked = believed = 0
        if endpoint is not None:
            scores["rules and model"] = evaluation.scored(jobs, tables[name], opinion=model)
        scores["an opinion that is always right"] = evaluation.scored(jobs, tables[name], opinion=always_right)
        found[name] = scores | ({"asked": asked, "believed": believed} if endpoint is not None else {})
        for which, each in scores.items():
            print(f"{name}, {which}: F1 {each.f1}, precision {each.precision} ({believed} of {asked})", flush=True)
    return found


def main() -> int:
    ask = argparse.ArgumentParser(prog="python -m benchmarks.papers.schedmate.language_model", description=__doc__)
    ask.add_argument("url", nargs="?", default="", help="an OpenAI-compatible endpoint, for example of `stoker serve`")
    ask.add_argument("model", nargs="?", default="", help="the model at the endpoint")
    asked = ask.parse_args()
    endpoint = None
    if asked.url:
        model = LanguageModel(asked.url, asked.model, time_limit_s=300.0, session_budget=10_000_000)
        endpoint = Endpoint(model)
    began = time.monotonic()
    record: dict[str, Any] = {
        "command": f"python -m benchmarks.papers.schedmate.language_model URL {asked.model}", "model": asked.model,
        "machine": machine(), "commit": commit(), "lines": lines(endpoint),
    }  # fmt: skip
    if endpoint is not None:
        record["tokens of lines"] = endpoint.model.session_budget - endpoint.tokens_left
    record["failures"] = failures(endpoint)
    if endpoint is not None:
        record["tokens"] = endpoint.model.session_budget - endpoint.tokens_left
        record["s"] = round(time.monotonic() - began)
        text = json.dumps(msgspec.to_builtins(record), indent=1)
        write_whole(RECORD, text.encode() + b"\n", mode=0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main())
