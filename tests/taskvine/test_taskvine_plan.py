"""Convert site files to TaskVine settings, without TaskVine."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from stoker.config import Site, parse_site
from stoker.errors import SessionError
from stoker.manager.cli import doctor_site
from stoker.manager.cli.doctor_machine import FindingLevel
from stoker.manager.factory.condor_description import gpu_type_expression
from stoker.manager.taskvine.planning import make_vine_plan
from stoker.pilot.taskvine import engine
from stoker.pilot.taskvine import factory as taskvine_factory
from stoker.pilot.taskvine.engine import VineWorker
from stoker.pilot.taskvine.pool import slot_devices
from stoker.protocol.session import SessionFolder

SLURM = """
name = "lab"
engine = "taskvine"

[provider]
kind = "slurm"
partition = "backfill"
account = "phys lab"
walltime = "2 h"
gpus = "a10:2"
cores = 8
memory = "32 GB"
options = ["--exclusive"]
worker_init = "module load cuda"

[pilot]
init_blocks = 2
max_blocks = 5

[session]
heartbeat = "4 s"
ports = "30000-30100"
"""
CONDOR = """
engine = "taskvine"

[provider]
kind = "condor"
account = "group_a"
gpus = "A10:1"
requirements = "HasTaskVine"
options = ["+Project = \\"hot\\""]
"""


def site(text: str) -> Site:
    return parse_site(text, file="site.toml")


def command(made: engine.VinePlan, **more) -> list[str]:
    return engine.factory_command(
        made,
        factory="/v/vine_factory",
        worker="/v/vine_worker",
        port=9123,
        folder=Path("/s/factory"),
        password=Path("/s/keys/taskvine"),
        orders=Path("/s/factory.json"),
        **more,
    )


def option(words: list[str], name: str) -> str:
    [value] = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return value


def test_this_machine_gets_one_worker_that_dies_with_its_factory():
    made = make_vine_plan(site('engine = "taskvine"\n[pilot]\ndevices = "cpu:3"\n'), python="/e/bin/python")
    words = command(made, workspace=Path("/tmp/my work"))
    assert words[0] == "/v/vine_factory"
    assert words[-2:] == ["localhost", "9123"]
    assert option(words, "batch-type") == "local"
    assert int(option(words, "cores")) == max(3, len(os.sched_getaffinity(0)))
    assert (option(words, "min-workers"), option(words, "max-workers")) == ("1", "1")
    assert option(words, "extra-options") == "--parent-death --connect-timeout=120 --workspace='/tmp/my work'/$$"
    assert not [word for word in words if word.startswith(("--gpus", "--batch-options", "--wrapper", "--memory"))]


def test_slurm_options_come_from_the_site_file():
    made = make_vine_plan(site(SLURM))
    words = command(made, host="10.4.0.2")
    assert option(words, "batch-type") == "slurm"
    assert option(words, "batch-options") == (
        "--partition=backfill --account='phys lab' --time=120 --gres=gpu:a10:2 --exclusive"
    )
    marked = command(make_vine_plan(site(SLURM), session="k3v9"))
    assert option(marked, "batch-options") == option(words, "batch-options") + " --job-name=stoker-k3v9-worker"
    assert (option(words, "cores"), option(words, "gpus"), option(words, "memory")) == ("8", "2", "30517")
    assert (option(words, "min-workers"), option(words, "max-workers")) == ("2", "5")
    assert option(words, "extra-options") == f"--connect-timeout=120 --wall-time={2 * 3600 - 30}"
    assert words[-2:] == ["10.4.0.2", "9123"]
    assert (made.ports, made.heartbeat_s, made.silence_s) == ((30000, 30100), 4, 12)
    assert (made.idle_s, make_vine_plan(site(SLURM), kept=True).idle_s) == (120, 1800)


def test_condor_options_come_from_the_site_file():
    words = command(make_vine_plan(site(CONDOR), session="k3v9"))
    assert option(words, "batch-type") == "condor"
    assert option(words, "condor-requirements") == "HasTaskVine"
    assert option(words, "batch-options").splitlines() == [
        "+MaxWallTime = 60",
        "accounting_group = group_a",
        f"require_gpus = {gpu_type_expression('A10')}",
        '+Project = "hot"',
        '+StokerSession = "k3v9"',
        '+StokerSource = "local"',
        '+StokerBlock = "worker"',
    ]


def test_worker_init_runs_before_a_worker(tmp_path):
    made = make_vine_plan(site(SLURM.replace('"module load cuda"', '"export DONE=first"')))
    script = tmp_path / "worker-init.sh"
    script.write_text(engine.make_init_script(made))
    script.chmod(0o700)
    said = subprocess.run([str(script), "sh", "-c", 'echo "$DONE $1"', "sh", "a b"], capture_output=True, text=True)
    assert said.stdout == "first a b\n"
    words = command(made, init_script=script)
    assert option(words, "wrapper") == "./worker-init.sh"
    assert option(words, "wrapper-input") == str(script)
    assert engine.make_init_script(make_vine_plan(Site())) == ""


@pytest.mark.parametrize(
    ("scratch", "in_shell"),
    [("/local disk", "'/local disk'"), ("$TMPDIR", "$TMPDIR"), ("$TMPDIR/a b", "$TMPDIR/'a b'"), ("~/x", "~/x")],
)
def test_scratch_variable_is_expanded_by_the_shell_on_the_node(scratch, in_shell):
    made = make_vine_plan(site(SLURM.replace("[pilot]", f'[pilot]\nscratch = "{scratch}"')))
    assert option(command(made), "extra-options").endswith(f"--workspace={in_shell}/stoker-vine-$$")


def test_plan_is_stored_in_the_session_folder(tmp_path):
    folder = SessionFolder(tmp_path)
    made = make_vine_plan(site(SLURM), python="/e/bin/python", search_path="/a:/b")
    engine.write_plan(made, folder, site="lab")
    assert engine.read_plan(folder, site="lab") == made
    assert (tmp_path / "taskvine-lab.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(SessionError, match="no plan of site other"):
        engine.read_plan(folder, site="other")


def test_slot_is_a_gpu_or_a_core_of_a_worker_without_gpus():
    gpus = VineWorker(name="n1", cores=8, gpus=2, memory_bytes=64_000)
    cores = VineWorker(name="n2", cores=8, gpus=0, memory_bytes=64_000)
    many = engine.VinePlan(most_workers=3)
    assert [slot.device for slot in slot_devices(gpus, many)] == [f"cuda:{n}" for n in range(6)]
    assert [slot.device for slot in slot_devices(gpus, many, workers=1)] == ["cuda:0", "cuda:1"]
    assert slot_devices(gpus, many)[0].memory_bytes == 32_000
    assert len(slot_devices(cores, many)) == 24
    assert [slot.cores for slot in slot_devices(cores, engine.VinePlan(devices="cpu:2"))] == [4, 4]
    assert [slot.device for slot in slot_devices(gpus, engine.VinePlan(devices="cpu:4"))] == [
        f"cpu:{n}" for n in range(4)
    ]
    assert {slot.kind.partition(" ")[0] for slot in slot_devices(gpus, many)} == {"gpu"}


def test_dry_run_shows_the_pool_and_its_worker_command():
    made = site(SLURM + 'interface = "127.0.0.1"\n')
    lines, refused = doctor_site.render_submit_script(made)
    head, pool, then, factory = lines
    assert not refused
    assert head.endswith("run here, one in all")
    assert "-m stoker.pilot.taskvine.main" in pool
    assert pool.endswith("--host 127.0.0.1 --block b1")
    assert then == "# this pilot starts TaskVine's factory, which starts workers, 2 at first, up to 5:"
    words = shlex.split(factory)
    assert option(words, "batch-options").endswith("--job-name=stoker-k3v9-worker")
    assert words[-2:] == ["127.0.0.1", "30000"]


@pytest.mark.usefixtures("no_taskvine")
def test_doctor_checks_taskvine_and_its_worker_resources(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    vine, *others = doctor_site.check_site_file(site(SLURM + 'interface = "127.0.0.1"\n'))
    assert vine.level is FindingLevel.NEED
    assert vine.fix == taskvine_factory.INSTALL
    assert "is for slurm; this host has no batch system" in others[-1].text
