from __future__ import annotations

from benchmarks.papers.schedmate.language_model import ByHand
from benchmarks.papers.schedmate.metric_formats import HELD_OUT, HELD_OUT_SECOND
from benchmarks.papers.schedmate.metrics import Learned, made_cases, rows_of
from stoker.manager.advice.metrics import LineFormats

FORMATS = HELD_OUT | HELD_OUT_SECOND


def test_correct_answers_read_ten_formats_without_a_rule() -> None:
    cases = [case for case in made_cases(FORMATS) if case.name.endswith("-1")]
    assert len(cases) == 10
    without = rows_of(cases, "", Learned(LineFormats(rules=lambda _: None), Silent()))
    assert without["all"]["found"] == 0.0
    rows = rows_of(cases, "", Learned(LineFormats(rules=lambda _: None), ByHand()))
    assert {form for form in FORMATS if rows[form]["right"] < 0.8} == set()
    assert rows["all"]["found"] > 0.95


class Silent(ByHand):
    def ask(self, *_: object, **__: object) -> dict[str, object]:
        return {}
