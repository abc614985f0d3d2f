from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from benchmarks.papers.schedmate import faults
from benchmarks.papers.schedmate.faults_lab import files, kinds, surroundings

README = (surroundings.ROOT / "benchmarks" / "FINDINGS.md").read_text()


@pytest.fixture
def lab() -> None:
    if reason := surroundings.why_not():
        pytest.skip(reason)


def test_record_covers_all_kinds_and_matches_the_page() -> None:
    record = json.loads(faults.RECORD.read_text())
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


def test_record_with_a_retried_mistake_misses_the_bar() -> None:
    record = json.loads(faults.RECORD.read_text())
    record["kinds"]["/dev/full"]["ran_more_than_once"] = 1
    assert not faults.all_kinds_as_expected(record)
    record["kinds"]["/dev/full"]["ran_more_than_once"] = 0
    record["kinds"]["ESTALE"]["lost_budget"] = 1
    assert not faults.all_kinds_as_expected(record)


@pytest.mark.parametrize(("error", "when"), [("ESTALE", "open"), ("EIO", "read")])
def test_library_receives_the_injected_error_and_other_files_do_not(
    lab: None, tmp_path: Path, error: str, when: str
) -> None:
    numpy = pytest.importorskip("numpy")
    path, other = tmp_path / "a.npy", tmp_path / "b.npy"
    for each in (path, other):
        numpy.save(each, numpy.arange(9))
    read = files.READERS["numpy.load"][1]
    with surroundings.failing_file(str(path), error, when=when):
        with pytest.raises(OSError, match="Errno") as caught:
            read(str(path))
        assert read(str(other)) == (9,)
    assert caught.value.errno == getattr(errno, error)
    assert read(str(path)) == (9,)
