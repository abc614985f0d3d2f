"""`stoker doctor SITE --tests` reports the missing parts of incomplete sites and runs the other tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cli.command_line import write_commands
from driver.machine import Machine
from faults.world import World

from stoker.manager.cli.site_suite import PromiseVerdict, SiteReport, TriedPromise
from stoker.site_tests import plugin

ROOT = Path(__file__).resolve().parents[2]
STARTS, SEES, LEDGER = "a pilot starts", "a call sees", "the memory ledger"
GPUS = '[pilot]\ndevices = "gpu"\nprobe = "never"\n'


def start(world: World, text: str, *options: str, **environ: str) -> subprocess.Popen[str]:
    (world.path / "here.toml").write_text(f'name = "here"\n{text}')
    command = [sys.executable, "-m", "stoker.manager.cli.entry", "doctor", "here.toml", "--tests", *options]
    return world.spawn(command, folder=world.path, **environ)


def prove(world: World, text: str, chosen: str, *options: str, **environ: str) -> tuple[int, SiteReport]:
    process = start(world, text, "--json", "-k", chosen, *options, **environ)
    out, err = process.communicate(timeout=120)
    assert out, err
    [report] = msgspec.json.decode(out, type=dict[str, list[SiteReport]])["sites"]
    return process.returncode, report


def prove_gpus(
    world: World, *gpus: dict[str, Any], chosen: str = "starts or sees or ledger", **driver: Any
) -> SiteReport:
    return prove(world, GPUS, chosen, **Machine(world.path, *gpus, **driver).environment)[1]


def start_until_a_promise_holds(world: World) -> subprocess.Popen[str]:
    process = start(world, '[pilot]\ndevices = "cpu:1"\n')
    for line in process.stderr:
        if line.startswith("  ok "):
            break
    return process


def of(report: SiteReport, title: str) -> TriedPromise:
    return next(each for each in report.promises if each.title.startswith(title))


def test_site_tests_exit_with_code_0_if_no_promise_fails(world):
    code, report = prove(world, '[pilot]\ndevices = "cpu:1"\n', "starts or is_hot or two_devices")
    assert (code, of(report, STARTS).verdict) == (0, PromiseVerdict.HOLDS)
    assert of(report, "a context loads once").verdict is PromiseVerdict.HOLDS
    over_two = of(report, "a context over two devices")
    assert (over_two.verdict, over_two.why) == (PromiseVerdict.NOT_TRIED, "no pilot here has two devices of one kind")
    assert not list((world.home / "site-tests").iterdir()), "a run without a failure keeps no folder"


@pytest.mark.long
def test_site_without_gpus_fails_once_and_tries_nothing_else(world):
    machine = Machine(world.path)
    code, report = prove(world, GPUS, "", **machine.environment)
    first, *others = report.promises
    assert (code, first.verdict) == (1, PromiseVerdict.FAILS)
    assert "no GPU was granted to this pilot: NVML shows no GPU" in first.why
    assert Path(first.log).is_dir()
    assert len(others) >= 15
    assert {(each.verdict, each.why) for each in others} == {(PromiseVerdict.NOT_TRIED, "no pilot started")}


@pytest.mark.long
def test_exclusive_gpu_is_reported_and_not_shared(world):
    gpus = {"mode": 3}, {"name": "NVIDIA TITAN X", "memory": 12e9}
    report = prove_gpus(world, *gpus, chosen="starts or two_devices or share")
    assert report.devices[:2] == ("1 x NVIDIA A10 with 24.0 GB", "1 x NVIDIA TITAN X with 12.0 GB")
    assert "EXCLUSIVE_PROCESS" in of(report, "two contexts share").why
    assert of(report, "a context over two devices").why == "no pilot here has two devices of one kind"


@pytest.mark.long
def test_mig_slice_is_a_device_of_its_kind(world):
    part = {"uuid": "MIG-0", "name": "MIG 1g.5gb", "memory": 5e9}
    report = prove_gpus(world, {"mig": [part]})
    assert report.devices[0] == "1 x MIG 1g.5gb with 5.0 GB"
    assert (of(report, SEES).verdict, of(report, LEDGER).verdict) == (PromiseVerdict.HOLDS, PromiseVerdict.NOT_TRIED)
    assert "PyTorch" in of(report, LEDGER).why


@pytest.mark.long
def test_memory_used_by_other_processes_is_reported(world):
    report = prove_gpus(world, {"used": {"1": 20e9}})
    assert report.devices == ("1 x NVIDIA A10 with 24.0 GB", "NVIDIA A10, shared, 20.0 GB held by other processes")
    assert of(report, SEES).verdict is PromiseVerdict.HOLDS


@pytest.mark.long
def test_error_of_a_site_without_scratch_names_the_folder(world):
    text = '[pilot]\ndevices = "cpu:1"\nscratch = "/proc/nowhere"\n'
    _, report = prove(world, text, "starts or is_hot")
    assert "no scratch folder could be created at /proc/nowhere" in of(report, STARTS).why
    assert of(report, "a context loads once").why == "no pilot started"


@pytest.mark.long
@pytest.mark.slow
def test_batch_system_that_does_not_answer_is_named(world):
    commands = world.path / "commands"
    commands.mkdir()
    write_commands(commands, **dict.fromkeys(("sbatch", "squeue", "scancel", "sinfo", "scontrol"), "exec sleep 60"))
    site = '[provider]\nkind = "slurm"\npartition = "main"\ncommand_limit = "1 s"\n[session]\ninterface = "127.0.0.1"\n'
    path = f"{commands}:{os.environ['PATH']}"
    code, report = prove(world, site, "starts or is_hot", "--wait", "4", PATH=path)
    assert code == 1
    assert re.search(r"\bs\w+ has not answered for 1 s", of(report, STARTS).why)
    assert of(report, "a context loads once").why == "no pilot started"


@pytest.mark.parametrize(
    ("text", "chosen", "said"),
    [
        ("[pilot]\ndevises = 1\n", "", "here.toml: line 3: [pilot] devises is not a setting; did you mean devices?"),
        ("", "nosuchtest", "no test of the site suite matches -k 'nosuchtest'"),
        pytest.param("", "((", "no test of the site suite matches -k '(('", marks=pytest.mark.long),
    ],
)
def test_wrong_site_file_or_expression_is_an_error(world, text, chosen, said):
    process = start(world, text, "-k", chosen)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert said in err


@pytest.mark.long
def test_ctrl_c_leaves_nothing_and_shows_the_results_so_far(world):
    process = start_until_a_promise_holds(world)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "  ok    a pilot starts and runs a call" in out
    assert "not tried: the run was interrupted" in out
    assert "interrupted after" in out.splitlines()[-1]
    assert not [*(world.home / "sessions").iterdir(), *(world.home / "site-tests").iterdir()]
    world.empty()


def test_pytest_exits_with_an_error_if_the_site_file_is_missing(world):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "tests" / "site")]
    process = world.spawn([*command, "--site", "missing.toml"], folder=world.path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 4, out + err
    assert "missing.toml: no such file" in err


@pytest.mark.parametrize(
    ("given", "says"), [({}, "pytest --site SITE.toml"), ({"site_file": "here.toml", "numprocesses": 2}, "without -n")]
)
def test_pytest_refuses_site_tests_with_wrong_options(given: dict[str, Any], says: str):
    config = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=given.get, option=SimpleNamespace(**given))
    with pytest.raises(pytest.UsageError, match=says):
        plugin.pytest_configure(config)  # type: ignore[arg-type]


@pytest.mark.long
def test_results_before_a_crash_of_the_suite_are_shown(world):
    process = start_until_a_promise_holds(world)
    os.kill(min(world.of("pytest")), signal.SIGKILL)  # a process that it forks has its name for a moment
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the site suite stopped early (pytest ended with exit code -9)" in out
    assert "interrupted after" in out.splitlines()[-1]
