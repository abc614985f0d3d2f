from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu import budget, kit, parts, run
from benchmarks.gpu.bars import FULL_OF_NONE, MET, OF_LIMIT, OF_PINNED, bars


def asked(out: Path, *parts: str) -> argparse.Namespace:
    return argparse.Namespace(out=out, kit=out / "none", rehearse=True, commit="", parts=list(parts))


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "record.json").read_text())
    return found


def scripted(made: run.Run, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]) -> None:
    """Replace each named part by its script, and every other part by an empty script."""
    plain = made._run
    monkeypatch.setattr(made, "_run", lambda name, words, **how: plain(name, ["-c", scripts.get(name, "0")], **how))
    monkeypatch.setattr(run, "_IMPORTS", "print(1.5)")


def test_benchmark_part_that_hangs_or_fails_stops_no_other_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run.Run(asked(tmp_path, "turns", "encoder", "gang"))
    kept = f"import json; assert json.load(open({str(tmp_path / 'record.json')!r}))['parts']"  # while parts run
    ways = {"turns": "raise SystemExit('no such thing')", "encoder": "import time; time.sleep(60)", "gang": kept}
    scripted(made, monkeypatch, ways)
    monkeypatch.setitem(budget.PARTS, "encoder", budget.Part("slow", 0.5, 0.5))
    assert made.all() == 1
    said = {part["name"]: (part["status"], part["why"]) for part in record(tmp_path)["parts"]}
    assert said["encoder"][0] == "too slow"
    assert said["turns"] == ("failed", "exit code 1: no such thing")
    assert said["gang"] == ("ok", "")


def test_gpu_run_starts_on_a_machine_without_any_package() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", run.__file__, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_benchmark_parts_are_not_started_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run.Run(asked(tmp_path, "gang", "turns"))
    scripted(made, monkeypatch, {})
    made.ends_at = made.began
    made.all()
    assert [part["status"] for part in record(tmp_path)["parts"][1:]] == ["not reached"] * 2


def test_all_benchmark_parts_exist_and_fit_into_the_time_limit() -> None:
    typical = sum(part.typical_s for part in budget.PARTS.values()) + budget.KIT.typical_s
    assert typical <= budget.IN_ALL_S <= 480
    assert set(budget.PARTS) == {*parts.PARTS, "site", "tests"}
    for name in parts.PARTS:
        assert callable(parts.function_of(name))


def test_selecting_a_part_selects_its_dependencies() -> None:
    assert budget.with_needs(["slinfer"]) == ["device", "model", "slinfer"]
    assert budget.with_needs(list(budget.PARTS)) == list(budget.PARTS)


def measured(*, rehearsal: bool = False) -> dict[str, Any]:
    numbers: dict[str, dict[str, Any]] = {
        "site": {"holds": 12, "not tried": 1},
        "decode": {f"eager, batch 1: {OF_LIMIT}": 0.1, f"graphs, batch 1: {OF_LIMIT}": 0.6,
                   f"eager, batch 64: {OF_LIMIT}": 0.69},
        "load": {f"from a snapshot, warm: {OF_PINNED}": 0.2},
        "slinfer": {f"slinfer: {MET}": 0.9, f"exclusive: {MET}": 0.0},
        "awareness": {FULL_OF_NONE: 5.0},
    }  # fmt: skip
    rows = [{"name": name, "status": "ok", "numbers": found} for name, found in numbers.items()]
    return {"rehearsal": rehearsal, "parts": rows}


def test_bars_are_judged_by_measurements_except_in_a_rehearsal() -> None:
    found = [(each["measured"], each["met"]) for each in bars(measured())]
    assert found == [
        ("12 holds, 0 fails, 1 not tried (ok)", "met"), ("0.60 (graphs)", "met"), ("0.69 (eager)", "missed"),
        ("0.20 (the whole load, files in the page cache)", "missed"), ("inf (90 % and 0 %)", "met"), ("5.00", "met"),
    ]  # fmt: skip

    assert {each["met"] for each in bars(measured(rehearsal=True))} == {"rehearsal"}
    assert {each["met"] for each in bars({"rehearsal": False, "parts": []})} == {"not measured"}

    failed = measured()
    failed["parts"][0] |= {"status": "failed", "numbers": {"holds": 11, "fails": 1}}
    assert bars(failed)[0]["met"] == "missed"


def test_site_suite_results_come_from_its_file_or_else_its_log(tmp_path: Path) -> None:
    file = tmp_path / "site.json"
    suite = budget.Suite(["x"], results=file)
    log = tmp_path / "log"
    log.write_text("one.py::test_hello PASSED  [ 50%]\none.py::test_pair SKIPPED (one GPU) [100%]\n")
    assert suite.numbers(log) == {
        "holds": 1, "not tried": 1, "test_hello": "holds", "test_pair": "not tried: one GPU",
    }  # fmt: skip
    promises = [{"title": "a pilot starts", "verdict": "holds"}, {"title": "MIG", "verdict": "fails", "why": "no\nMIG"}]
    file.write_text(json.dumps({"site": "s", "promises": promises}))
    assert suite.numbers(log) == {"holds": 1, "fails": 1, "a pilot starts": "holds", "MIG": "fails: no MIG"}
    assert suite.verdict(0, log)[0] == "failed"


def test_kit_contains_the_requirements_of_stoker() -> None:
    """The kit has all requirements except PyTorch and pyarrow, which GPU machines have."""
    text = (kit.ROOT / "setup.cfg").read_text().partition("install_requires =")[2].partition("[")[0]
    asked = [line.split(">")[0].strip() for line in text.splitlines() if line.strip()]
    required: set[str] = set()
    while asked:
        name = canonicalize_name(asked.pop())
        if name in required or name == "pyarrow":
            continue
        required.add(name)
        needs = [Requirement(each) for each in metadata.requires(name) or ()]
        asked += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    assert "msgspec" in required
    assert required <= {canonicalize_name(name) for name in kit.NAMES}
