"""Load small real tasks as (input, target) pairs from `../shared/data`."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks.harness import ROOT, Skipped

DATA = ROOT.parent / "shared" / "data"
PROMPTS = DATA / "prompts" / "prompt_bank.jsonl.xz"
Pairs = list[tuple[str, str]]
Row = dict[str, Any]
WORDS = {"SUPPORTS": " true", "REFUTES": " false", "NOT ENOUGH INFO": " unknown", "NOT_ENOUGH_INFO": " unknown",
         "DISPUTED": " disputed"}  # fmt: skip

FILES = {
    "claims": "fever/paper_dev.jsonl", "climate": "tasks/climate_fever/dataset/climate-fever.jsonl",
    "functions": "tasks/humaneval/data/HumanEval.jsonl.gz",
    "problems": "tasks/gsm8k/grade_school_math/data/train.jsonl",
    "symmetric": "tasks/feversymmetric/symmetric_v0.2/fever_symmetric_dev.jsonl",
    "opposites": "tasks/feversymmetric/symmetric_v0.1/fever_symmetric_full.jsonl",
}  # fmt: skip


def need_prompts() -> None:
    if not PROMPTS.exists():
        raise Skipped(f"{DATA} has no prompts; the candidates are not in the repository")


def rows(name: str) -> list[Row]:
    data = (DATA / FILES[name]).read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if FILES[name].endswith("gz") else data).splitlines()]


def articles() -> Pairs:
    every = [one for row in rows("climate") for one in row["evidences"]]
    return [(f"\nSentence: {one['evidence']}\nArticle:", f" {one['article']}") for one in every]


def calculations() -> Pairs:
    found = [one for row in rows("problems") for one in re.findall(r"<<(.*?)=(.*?)>>", row["answer"])]
    return [(f"\n{term} =", f" {result}") for term, result in dict(found).items()]


def results() -> Pairs:
    lines = [line for row in rows("problems") for line in row["answer"].split("\n")]
    steps = [step for line in lines if (step := re.match(r"(.*?)\s*=\s*(\S*)<<.*?>>(.*)", line))]
    return [(f"\nStep: {step[1]}\nResult:", f" {step[2]}{step[3]}") for step in steps]


def endings() -> Pairs:
    claims = [row["claim"].split() for row in rows("claims")]
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in claims]
    return [(f"\nBegin: {' '.join(first)}\nEnd:", f" {' '.join(second)}") for first, second in halves]


def opposites() -> Pairs:
    of: dict[str, dict[str, str]] = {}
    for row in rows("opposites"):
        of.setdefault(row["evidence_sentence"], {})[row["label"]] = row["claim"]
    both = [one for one in of.values() if {"REFUTES", "SUPPORTS"} <= set(one)]
    return [(f"\nClaim: {one['REFUTES']}\nOpposite:", f" {one['SUPPORTS']}") for one in both]


def names() -> Pairs:
    found = []
    for row in rows("functions"):
        said = re.search(r'("""|\'\'\')\s*(.*?)(\.\s|\n\s*\n|>>>|"""|\'\'\')', row["prompt"], re.DOTALL)
        if said and said[2].strip():
            found.append((f"\nText: {' '.join(said[2].split())}\nName:", f" {row['entry_point']}"))
    return found


def _each(name: str, pair: Callable[[Row], tuple[str, str]]) -> Callable[[], Pairs]:
    return lambda: [pair(row) for row in rows(name)]


TASKS: dict[str, Callable[[], Pairs]] = {
    "claims": _each("claims", lambda row: (f"\nClaim: {row['claim']}\nAnswer:", WORDS[row["label"]])),
    "statements": _each("symmetric", lambda row: (f"\nText: {row['evidence']}\nStatement:", f" {row['claim']}")),
    "climate": _each("climate", lambda row: (f"\nClaim: {row['claim']}\nVerdict:", WORDS[row["claim_label"]])),
    "evidence": _each(
        "symmetric",
        lambda row: (f"\nEvidence: {row['evidence']}\nClaim: {row['claim']}\nAnswer:", WORDS[row["label"]]),
    ),
    "sums": _each(
        "problems", lambda row: (f"\nQuestion: {row['question']}\nAnswer:", " " + row["answer"].split("#### ")[1])
    ),
    "steps": _each(
        "problems", lambda row: (f"\nProblem: {row['question']}\nFirst step:", " " + row["answer"].split("\n")[0])
    ),
    "programs": _each("functions", lambda row: (f"\n{row['prompt']}", row["canonical_solution"].split("\n")[0])),
    "topics": _each(
        "climate", lambda row: (f"\nClaim: {row['claim']}\nTopic:", f" {row['evidences'][0]['article']}")
    ),
    "articles": articles, "calculations": calculations, "results": results, "endings": endings,
    "opposites": opposites, "names": names,
}  # fmt: skip
