"""`stoker explain` names the cause and remedy of each failure mode of docs/examples/broken.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE_S, polls
from session_that_is_up import SessionUp

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "docs" / "examples" / "broken.py"
WAYS = {
    "code": ("user", "code", "line 31, in answer", "ValueError: matmul", "fix that line"),
    "data": ("user", "data", "line 33, in answer", "No such file or directory: 'claims.npy'", "give a path"),
    "package": ("user", "package", "line 35, in answer", "No module named 'claim_reader'", "install the package"),
    "memory": ("user", "declared_memory", "of memory and declares 300 MB", "it ended its library 2 times", "declare"),
    "time": ("user", "time", "its limit is 5 s", "the call ran for", "raise `timeout`"),
    "disk": ("infrastructure", "disk", "Errno 5", "failed the call 3 times, on 1 pilot", "submit again"),
}
LIMIT_S = 200
"""Time limit of all programs. The call with a disk error pauses for 45 s between three tries."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionUp]:
    with SessionUp(tmp_path_factory.mktemp("broken")) as up:
        yield up


@pytest.fixture(scope="module")
def broken(up: SessionUp) -> dict[str, dict[str, Any]]:
    """Run the broken programs in one session; return the output of `stoker explain` with and without `--json`."""
    environ = {**os.environ, "STOKER_SESSION": up.name}
    programs = {
        way: subprocess.Popen(
            [sys.executable, str(PROGRAM), way], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for way in WAYS
    }
    told: dict[str, dict[str, Any]] = {}
    for way, program in programs.items():
        said = program.communicate(timeout=LIMIT_S)[0].decode()
        assert program.returncode != 0, said
        named = re.search(r"\bc-[\d.]+\b", said)
        assert named is not None, said
        told[way] = json.loads(up.stoker("explain", named[0], up.name, "--json"))
        told[way]["shown"] = up.stoker("explain", named[0], up.name)
    return told


def test_troubleshooting_lists_the_broken_programs() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert "python docs/examples/broken.py code" in page
    assert set(re.findall(r"^(\w+) {2,}", PROGRAM.read_text().split('"""')[1], re.MULTILINE)) == set(WAYS)
    for way in WAYS:
        assert re.search(rf"^\| `{way}` \| .*\({WAYS[way][1]}\)", page, re.MULTILINE), way


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_broken_program_is_explained(broken: dict[str, dict[str, Any]], way: str) -> None:
    kind, component, *proof, do = WAYS[way]
    verdict, shown = broken[way]["verdict"], broken[way]["shown"]
    assert (verdict["kind"], verdict["component"]) == (kind, component)
    assert verdict["sure"] >= 0.8
    lines = "\n".join(line["text"] for line in verdict["proof"])
    for part in proof:
        assert part in lines
        assert part in shown[shown.index("  verdict") :]
    assert verdict["do"].startswith(do)
    assert f"  do        {verdict['do']}" in shown


@pytest.mark.long
def test_verdict_lists_the_actions_of_stoker(broken: dict[str, dict[str, Any]]) -> None:
    assert [what.partition(" not on ")[0] for what in broken["disk"]["verdict"]["done"]] == [
        "ran again, for 15 s",
        "ran again, for 30 s",
    ]
    assert broken["memory"]["verdict"]["done"] == ["ran again after the first death of its library"]
    assert broken["code"]["verdict"]["done"] == []


@pytest.mark.long
def test_job_without_python_on_its_node_is_explained(up: SessionUp, tmp_path: Path) -> None:
    site = tmp_path / "away.toml"
    site.write_text(
        '[provider]\nkind = "local"\n[pilot]\ndevices = "cpu:1"\n[environment]\npython = "/opt/away/python"\n'
    )
    stoker = [sys.executable, "-m", "stoker.manager.cli.entry"]
    said = subprocess.run([*stoker, "up", str(site)], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    name = re.findall(r"session (\w+)", said)[0]
    try:
        for more in polls(PATIENCE_S):  # ask repeatedly: the job may not run yet
            verdict = json.loads(up.stoker("explain", "b1", name, "--json"))["verdict"]
            if verdict is not None:
                break
            assert more
    finally:
        up.stoker("down", name)
    assert (verdict["kind"], verdict["component"]) == ("framework", "environment")
    assert (verdict["proof"][0]["source"], verdict["proof"][0]["number"]) == ("b1.err", 1)
    assert "/opt/away/python" in verdict["proof"][0]["text"]
    assert verdict["do"].startswith("fix [environment] python")


@pytest.mark.long
def test_killed_pilot_is_explained(up: SessionUp) -> None:
    for more in polls(PATIENCE_S):
        pilots = json.loads(up.stoker("status", up.name, "--json"))["status"]["pilots"]
        if pilots:
            break
        assert more
    pilot = pilots[0]["pilot"]
    joined = re.search(r"\(process (\d+)\)", up.stoker("explain", pilot, up.name))
    assert joined is not None
    os.kill(int(joined[1]), signal.SIGKILL)
    for more in polls(PATIENCE_S):
        verdict = json.loads(up.stoker("explain", pilot, up.name, "--json"))["verdict"]
        if verdict is not None:
            break
        assert more
    assert (verdict["kind"], verdict["component"]) == ("infrastructure", "node")
    assert "counted as lost: unexplained" in verdict["proof"][0]["text"]
    assert verdict["do"]
