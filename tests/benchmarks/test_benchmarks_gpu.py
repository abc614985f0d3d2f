"""`make gpu`, rehearsed: a part that fails or hangs is a line of the record, and the next one runs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kit, run
from benchmarks.gpu.page import render

SCRIPT = Path(run.__file__)


def asked(out: Path, *parts: str) -> argparse.Namespace:
    return argparse.Namespace(out=out, kit=out / "none", size=1e6, rehearse=True, commit="", parts=list(parts))


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "record.json").read_text())
    return found


def test_a_rehearsed_part_leaves_its_numbers_and_says_that_it_was_rehearsed(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, SCRIPT, "probe", "--rehearse", "--out", tmp_path, "--kit", tmp_path / "none"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    made = record(tmp_path)
    assert made["rehearsal"]
    assert [(part["name"], part["status"]) for part in made["parts"]] == [("kit", "ok"), ("probe", "ok")]
    numbers = made["parts"][1]["numbers"]
    assert numbers["cuda:1 is"].startswith("UNKNOWN")  # there is a stand-in for NVML, and none for CUDA
    page = (tmp_path / "page.md").read_text()
    assert "A rehearsal" in page
    assert "| cuda:1 is | UNKNOWN" in page


def test_a_part_that_hangs_or_fails_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run.Run(asked(tmp_path, "gang", "tune", "model"))
    ways = {"gang": "import time; time.sleep(60)", "tune": "raise SystemExit('no such thing')", "model": "print(7)"}
    plain = made._run
    monkeypatch.setattr(made, "_run", lambda name, words, **how: plain(name, ["-c", ways.get(name, "0")], **how))
    monkeypatch.setitem(run.PARTS, "gang", ("two", 0.5))
    assert made.all() == 1
    said = {part["name"]: (part["status"], part["why"]) for part in record(tmp_path)["parts"]}
    assert said["gang"][0] == "too slow"
    assert said["tune"] == ("failed", "exit code 1: no such thing")
    assert said["model"] == ("ok", "")


def test_a_run_that_is_out_of_time_still_writes_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run.Run(asked(tmp_path, "gang", "tune"))
    made.ends_at = made.began
    plain = made._run
    monkeypatch.setattr(
        made, "_run", lambda name, words, **how: plain(name, ["-c", "import time; time.sleep(60)"], **how)
    )
    made.all()
    assert [part["status"] for part in record(tmp_path)["parts"]] == ["too slow"] * 3
    assert record(tmp_path)["parts"][1]["why"].startswith("it did not end within 1 s")


def test_all_parts_fit_into_the_time_of_one_run_and_are_there() -> None:
    from benchmarks.gpu import parts

    assert run.IN_ALL_S <= 480
    assert set(run.PARTS) == {*parts.PARTS, "tests"}


def test_the_page_says_what_was_skipped_and_why() -> None:
    part = {"name": "gang", "title": "two", "status": "skipped", "seconds": 1.0, "why": "one GPU | here", "numbers": {}}
    page = render(
        {"rehearsal": False, "date": "2026-11-22", "machine": "m", "commit": "c", "seconds": 1.0,
         "counts": {"skipped": 1}, "parts": [part]}
    )  # fmt: skip
    assert "| gang | skipped | 1.0 | one GPU \\| here |" in page
    assert "rehearsal" not in page


def test_the_kit_brings_what_stoker_requires() -> None:
    """But for what such a machine has: PyTorch and what is as large as its data frames."""
    text = (kit.ROOT / "setup.cfg").read_text().partition("install_requires =")[2].partition("[")[0]
    required = {line.split(">")[0].strip() for line in text.splitlines() if line.strip()}
    assert required - {"pyarrow"} <= set(kit.NAMES)
