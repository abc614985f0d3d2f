from __future__ import annotations

import json

from benchmarks.harness import RECORDS, ROOT
from benchmarks.papers.schedmate import faults
from benchmarks.papers.schedmate.faults_lab import kinds

README = (ROOT / "benchmarks" / "FINDINGS.md").read_text()


def test_record_covers_all_fault_kinds_and_matches_the_page() -> None:
    record = json.loads((RECORDS / "schedmate-faults.json").read_text())
    rows = record["kinds"]
    assert set(rows) == {*kinds.FAULTS, *kinds.MISTAKES}
    assert {row["calls"] for row in rows.values()} == {faults.TIMES}
    assert faults.all_kinds_as_expected(record)
    struck = [row for row in rows.values() if row["is_fault"]]
    told = [row for row in rows.values() if not row["is_fault"] and not row["bounded"]]
    count, at_once = faults.TIMES * len(struck), sum(row["at_once"] for row in struck)
    assert f"| {count} of {count}, {at_once} at once;" in README
    assert f"| 0 of {faults.TIMES * len(told)} | 0: met |" in README
    assert sum(row["lost_budget"] for row in struck) == 0


def test_record_with_a_retried_user_mistake_misses_the_bar() -> None:
    record = json.loads((RECORDS / "schedmate-faults.json").read_text())
    record["kinds"]["/dev/full"]["ran_more_than_once"] = 1
    assert not faults.all_kinds_as_expected(record)
    record["kinds"]["/dev/full"]["ran_more_than_once"] = 0
    record["kinds"]["ESTALE"]["lost_budget"] = 1
    assert not faults.all_kinds_as_expected(record)
