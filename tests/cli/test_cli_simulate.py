from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from cli.command_line import Stoker

from benchmarks.baselines.loading import ROOT
from stoker.manager.cli.simulating import format_estimate
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.run_folder import StudyResults
from stoker.site import BASELINES

SMALL = ("--set", "workload.inputs=200", "--set", "outputs.plots=false", "--jobs", "1")
NO_AWARENESS = str(ROOT / BASELINES["no-awareness"])
KNOWN = ["awareness", "opportunistic", "static-pool", "two-kinds"]


def results(folder: Path) -> StudyResults:
    return msgspec.json.decode((folder / "results.json").read_bytes(), type=StudyResults)


def test_simulate_without_a_scenario_lists_the_scenarios(stoker: Stoker):
    told = stoker("simulate").output
    assert all(f"  {name} " in told for name in [*KNOWN, "default", "prompt-tuner"])
    assert "next: stoker simulate static-pool" in told
    assert set(msgspec.json.decode(stoker("simulate", "--json").output)) == {"scenarios", "policies"}


def test_policies_are_compared_and_all_written_files_are_named(stoker: Stoker, tmp_path: Path):
    done = stoker.ok("simulate", "awareness", *SMALL, "--policy", "default", "--policy", NO_AWARENESS, "--seeds", "2")
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("awareness-")
    lines = done.output.splitlines()
    assert lines[0] == "scenario awareness · default, forgetful.py:no_awareness · 2 seeds · 4 runs"
    head = next(line for line in lines if line.startswith("  policy "))
    first, second = lines[lines.index(head) + 1 :][:2]
    found = results(folder)
    assert found.complete
    assert [row.policy for row in found.policies] == ["default", NO_AWARENESS]
    for row, line in zip(found.policies, (first, second), strict=True):
        mean = row.estimates["done_after_s"]
        assert mean is not None
        assert f" {format_estimate(mean)} " in line
    assert "speed (x default)" in head
    assert "default is ahead of forgetful.py:no_awareness: forgetful.py:no_awareness takes " in done.output
    named = [Path(word) for line in lines for word in line.split() if word.startswith("runs/")]
    assert all(path.exists() for path in named)
    for name in ("logs", "scenario.toml", "results.json", "timeline.json.gz"):
        assert any(name in line and str(folder.name) in line for line in lines), name
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        f"{policy}-{seed}.parquet" for policy in ("default", "forgetful.py-no_awareness") for seed in (0, 1)
    ]


def test_json_output_is_one_document(stoker: Stoker, tmp_path: Path):
    done = stoker("simulate", "static-pool", *SMALL, "--seeds", "2", "--out", "here", "--json")
    document = msgspec.json.decode(done.stdout, type=dict[str, Any])
    assert len(document["results"]["runs"]) == 2
    assert document["results"]["policies"][0]["estimates"]["done_after_s"]["runs"] == 2
    assert document["results"] == msgspec.json.decode((tmp_path / "here" / "results.json").read_bytes())
    assert document["outputs"]["logs"] == ["here/logs/default-0.parquet", "here/logs/default-1.parquet"]


REFUSED = {
    ("statik-pool",): "did you mean static-pool",
    (".",): ". is a folder; name the file of a scenario",
    ("static-pool", "--policy", "defalt"): "--policy = 'defalt' is not a policy; did you mean 'default'?",
    ("static-pool", "--set", "links.shared=0 GB/s"): "the bandwidth must be more than 0",
    ("static-pool", "--set", "contexts.llm.device_memory=80 GB"): "no device can hold llm",
    ("static-pool", "--set", "contexts.lml.slots=2"): "there is no lml; did you mean llm?",
    ("static-pool", "--out", "full"): "full is not empty",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_invalid_input_is_refused_and_leaves_no_file(stoker: Stoker, tmp_path: Path, arguments: tuple[str, ...]):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    refused = stoker("simulate", *arguments)
    assert refused.exit_code == 1
    assert REFUSED[arguments] in str(refused.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]


OWN = """
from stoker.manager.policies import HottestFirst

class Careful(HottestFirst):
    def window(self, view, library):
        return 1

class Broken(HottestFirst):
    def pull(self, view, library):
        return 1 // 0
"""


def test_user_policy_is_named_by_its_file_and_copied_unchanged(stoker: Stoker, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text(OWN)
    done = stoker.ok(
        "simulate", "static-pool", *SMALL, "--seeds", "2", "--policy", "mine/own.py:Careful", "--out", "here"
    )
    assert done.output.startswith("scenario static-pool · own.py:Careful · 2 seeds")
    assert {path.name for path in (tmp_path / "here" / "logs").iterdir()} == {
        "own.py-Careful-0.parquet", "own.py-Careful-1.parquet"
    }  # fmt: skip
    (tmp_path / "mine" / "own.py").write_text("")
    stoker.ok("simulate", "here/scenario.toml", "--jobs", "1", "--out", "again")
    logs = [
        {path.name: path.read_bytes() for path in (tmp_path / each / "logs").iterdir()} for each in ("here", "again")
    ]
    assert logs[0] == logs[1]


def test_failing_policy_is_reported_after_finished_runs_are_saved(stoker: Stoker, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    policies = ["--policy", "default", "--policy", "own.py:Broken"]
    done = stoker("simulate", "static-pool", *SMALL, *policies, "--seeds", "3", "--out", "here")
    assert done.exit_code == 1
    assert isinstance(done.exception, SimulationError)
    assert str(done.exception).startswith("policy own.py:Broken, seed ")
    assert "own.py" in str(done.exception).partition("\n")[2]
    assert "ZeroDivisionError" in str(done.exception)
    assert "stopped: 1 of 6 runs were done, and are kept" in done.output
    found = results(tmp_path / "here")
    assert not found.complete
    assert {Path(run.log).name for run in found.runs} == {path.name for path in (tmp_path / "here" / "logs").iterdir()}


@pytest.mark.parametrize("jobs", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_ctrl_c_keeps_finished_runs(tmp_path: Path, jobs: str):
    command = [sys.executable, "-m", "stoker.manager.cli.main", "simulate", "two-kinds", "--jobs", jobs]
    options = ["--set", "workload.for=60 s", "--set", "outputs.plots=false", "--seeds", "5000", "--out", "here"]
    process = subprocess.Popen(
        [*command, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    first = process.stderr.readline()
    assert first.startswith("1/5000 runs: default, seed "), first + process.stderr.read()
    started = psutil.Process(process.pid).children(recursive=True)
    assert (len(started) >= 2) == (jobs == "2")
    os.killpg(process.pid, signal.SIGINT)  # signal the whole process group, like a terminal
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    found = results(tmp_path / "here")
    assert not found.complete
    assert f"stopped: {len(found.runs)} of 5,000 runs were done, and are kept" in out
    assert {path.name for path in (tmp_path / "here" / "logs").iterdir()} == {Path(run.log).name for run in found.runs}
    assert "Traceback" not in err
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_progress_bar_on_a_terminal_stays_on_one_line(tmp_path: Path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "stoker.manager.cli.main", "simulate", "static-pool", *SMALL, "--seeds", "3"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends reads from a closed terminal with this error
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait() == 0
    text = shown.decode()
    assert "runs \x1b" in text
    assert "2/3" in text
    assert "done after (s)" in text
    assert "/3 runs:" not in text  # progress lines are printed only without a progress bar
