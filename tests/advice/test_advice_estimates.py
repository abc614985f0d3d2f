from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.contexts.performance import PerformanceStore
from stoker.manager.advice import similar
from stoker.manager.advice.estimating import Estimator, MeasuredSample, fit_effects, merge_loader_facts, usual_exponent
from stoker.manager.advice.similar import SourceHistory, TermTable, make_fact_terms
from stoker.manager.advice.source.extractor import SourceText, extract_facts
from stoker.manager.advice.source.facts import SourceFact, WorkloadFacts

LOADER = """
import torch
from torch import nn
def load(width=64):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
"""
FUNCTION = """
import torch
def run(model, batch_size=8, steps=10):
    # a comment
    for step in range(steps):
        found = model(torch.randn(batch_size, 64)).argmax()
    return found
"""


def loader_facts(width: int = 64, text: str = LOADER) -> WorkloadFacts:
    return extract_facts(SourceText(text, "load"), arguments={"width": width})


def function_facts(*, text: str = FUNCTION, width: int = 64, **arguments: Any) -> WorkloadFacts:
    return merge_loader_facts(loader_facts(width), extract_facts(SourceText(text, "run"), arguments=arguments))


class World:
    def __init__(self, folder: Path) -> None:
        self.performance = PerformanceStore(folder / "performance.sqlite")
        self.history = SourceHistory(folder / "sources.sqlite")
        self.estimator = Estimator(self.history, self.performance.estimates)

    def ran(self, recipe: str, *, steps: int, run_s: float, kind: str = "cpu", width: int = 64) -> None:
        self.history.store_facts(recipe, loader_facts(width), name=f"{recipe}-name")
        self.history.store_facts(
            recipe, function_facts(steps=steps, width=width), function="run", name=f"{recipe}-name"
        )
        self.performance.record_load(
            recipe, kind=kind, load_s=width / 64, resident_bytes=width * 1000, peak_bytes=width * 2000
        )
        self.performance.record_runs(recipe, kind=kind, function="run", run_s=[run_s, run_s * 1.02])

    def close(self) -> None:
        self.performance.close()
        self.history.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_unseen_recipe_is_estimated_from_similar_recipes(world: World):
    for number, steps in enumerate((10, 20, 40, 80, 160)):
        world.ran(f"r{number}", steps=steps, run_s=steps / 100)
    one = world.estimator.estimate("cpu", loader=loader_facts(), function=function_facts(steps=56))
    assert one.run_s.median == pytest.approx(0.56, rel=0.25)
    assert one.run_s.low < 0.56 < one.run_s.high
    assert one.run_s.recipes == 5
    assert {each.row.recipe for each in one.from_runs} == {f"r{number}" for number in range(5)}
    assert one.from_runs[0].row.recipe in ("r2", "r3")
    assert one.from_runs[0].similarity >= one.from_runs[-1].similarity
    assert one.from_runs[0].row.name.endswith("-name")
    assert one.load_s.median == pytest.approx(1.0, rel=0.01)
    assert one.peak_bytes.median == pytest.approx(128_000, rel=0.01)
    assert one.why == ""


@pytest.mark.parametrize(
    "edited",
    [
        FUNCTION.replace("# a comment", "# quite another comment"),
        FUNCTION.replace("found", "answer").replace("step in", "s in"),
        FUNCTION.replace("steps", "rounds_wanted"),
    ],
)
def test_edited_comment_or_renamed_variable_keeps_the_estimates(world: World, edited: str):
    world.ran("before", steps=10, run_s=3.0)
    world.ran("other", steps=20, run_s=9.0)
    name = "rounds_wanted" if "rounds_wanted" in edited else "steps"
    one = world.estimator.estimate("cpu", function=function_facts(text=edited, **{name: 10}))
    assert one.run_s.median == pytest.approx(3.03, rel=0.01)
    assert one.run_s.recipes == 1
    assert one.run_s.log_sd < 0.05, "the same source: the spread comes from its own measurements"
    assert one.from_runs[0].similarity == 1.0


def test_missing_estimate_has_a_reason(world: World):
    empty = world.estimator.estimate("cpu", loader=loader_facts(), function=function_facts())
    assert empty.run_s is None
    assert empty.why == "no recipe in the history has a similarity of 0.55 or more"
    world.ran("r", steps=10, run_s=1.0, kind="NVIDIA A10")
    elsewhere = world.estimator.estimate("cpu", loader=loader_facts(), function=function_facts(steps=10))
    assert elsewhere.why == "1 similar recipes are in the history, and none was measured on cpu"
    strange = extract_facts(SourceText("def f():\n    import pandas\n    return pandas.read_csv('a.csv').mean()", "f"))
    assert "no recipe" in world.estimator.estimate("NVIDIA A10", function=strange).why
    broken = world.estimator.estimate("cpu", function=extract_facts(SourceText("def f(:", "f")))
    assert broken.why.startswith("the source is not known: <source>: not read: line 1")


def test_different_sizes_of_a_model_count_as_similar():
    def row(name: str) -> dict[str, float]:
        return make_fact_terms(WorkloadFacts(model=SourceFact(name, 1.0)))

    small, other = TermTable([row("SmolLM2-360M"), row("bert-base")], idf=False).cosine_similarities(
        row("SmolLM2-1.7B")
    )
    assert small > 0.15 > other


def test_run_time_exponent_is_fitted_if_there_are_enough_samples():
    samples = [MeasuredSample(0.1 * n**2, 0.0, 0.9, {"n": float(n)}) for n in (1, 2, 4, 8, 16, 32)]
    effects = fit_effects(samples, {"n": 64.0}, width=0.2)
    assert effects.exponents["n"] == pytest.approx(2 * math.log(2), rel=0.15), (
        "twice the number takes four times the time"
    )
    assert fit_effects(samples[:2], {"n": 64.0}, width=0.2) is None
    assert usual_exponent("steps", {}) == 0.9
    assert usual_exponent("batch_size", {"items": 1.0}) == 0.0 != usual_exponent("batch_size", {})
    assert usual_exponent("seed", {}) == 0.0


# ---- the history


FACTS = WorkloadFacts(model=SourceFact("gpt2", 0.9), text="run()", same="abc")


def test_unreadable_history_row_is_skipped(tmp_path: Path):
    path = tmp_path / "sources.sqlite"
    history = SourceHistory(path)
    history.store_facts("good", FACTS)
    history.store_facts("bad", FACTS)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE sources SET facts = x'7b22' WHERE recipe = 'bad'")
    db.close()
    assert [row.recipe for row in history.read_rows()] == ["good"]


def test_oldest_history_rows_are_deleted_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(similar, "MOST_ROWS", 3)
    history = SourceHistory(tmp_path / "sources.sqlite")
    for number in range(6):
        history.store_facts(f"r{number}", FACTS, function="run")
    assert len(history.read_rows()) == 4
