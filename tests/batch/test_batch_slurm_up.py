from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from batch.lab.commands import until
from batch.sessions import write_site
from faults.world import World
from session.test_session_up import stoker

PROGRAM = """
import os, sys
import stoker
from stoker import app, context

@context()
def words():
    return {"pilot": 5}

@app(context=words())
def measure(table, word):
    return table[word], os.environ["SLURMD_NODENAME"]

if __name__ == "__main__":
    with stoker.load(session=sys.argv[1]) as session:
        print(measure("pilot").result(), sum(context.loads for context in session.status().contexts))
"""


def run(world: World, session: str) -> str:
    process = world.start(PROGRAM, session)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_init_finds_the_cluster_and_writes_a_fitting_site_file(slurm, world):
    made = stoker(world, "init")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("wrote site.toml: Slurm, partition backfill\n")
    assert "preemptible, REQUEUE; a10:1 x 2, titanx:1 x 2" in made.stdout
    checked = stoker(world, "doctor", "site.toml")
    assert "site backfill: partition, account, walltime and GPUs are available" in checked.stdout
    assert "site backfill: Slurm would accept this script: Job " in checked.stdout
    assert "partitions backfill (preemptible, REQUEUE; a10:1 x 2, titanx:1 x 2), main (" in checked.stdout


def test_dry_run_prints_the_job_and_submits_nothing(slurm, world):
    write_site(world.path, provider={"gpus": "a10:1"})
    shown = stoker(world, "up", "lab.toml", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "#SBATCH --partition=backfill" in shown.stdout
    assert "#SBATCH --gres=gpu:a10:1" in shown.stdout
    assert "stoker.pilot.main --session" in shown.stdout
    assert re.search(
        r"^# site lab: Slurm would accept this script: Job \d+ to start at .* in partition backfill$",
        shown.stdout,
        re.M,
    )
    assert not (world.home / "sessions.d").exists()
    assert slurm_jobs() == []


def test_session_keeps_a_context_loaded_between_two_programs(slurm, world):
    write_site(world.path, provider={"gpus": "a10:1"})
    write_site(world.path, name="titan", provider={"gpus": "titanx:1"}, pilot={"init_blocks": 0})
    said = stoker(world, "up", "lab.toml", "titan.toml")
    assert said.returncode == 0, said.stderr
    found = re.match(
        r"session (\w{4}) is up: manager here \(pid \d+\), 1 block submitted to backfill \(job (\d+)\)", said.stdout
    )
    assert found, said.stdout
    session, job = found.groups()
    assert slurm_jobs() == [job]
    first, second = run(world, session), run(world, session)
    assert first == second
    assert re.fullmatch(r"\(5, 'n[12]'\) 1", first), "one load, on a node with an a10"
    status = stoker(world, "status", session)
    assert re.search(r"pilots +1 here", status.stdout), status.stdout
    ended = stoker(world, "down", session)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 calls done, 1 pilot released, 1 job ended; no process or job remains" in ended.stdout
    until(lambda: slurm_jobs() == [], what="no job in the queue")
    assert world.left() == []


def test_dry_run_fails_with_the_slurm_message_if_slurm_refuses(slurm, world):
    write_site(world.path, provider={"partition": "nowhere"})
    shown = stoker(world, "up", "lab.toml", "--dry-run")
    assert shown.returncode == 1
    assert "#SBATCH --partition=nowhere" in shown.stdout
    assert re.search(r"^# site lab: Slurm refuses this script: .*invalid partition", shown.stdout, re.M | re.I), (
        shown.stdout
    )
    assert slurm_jobs() == []


def test_doctor_tests_whether_slurm_accepts_a_block(slurm, world):
    write_site(world.path, provider={"memory": "4000 GB"})
    said = stoker(world, "doctor", "lab.toml")
    assert said.returncode == 1, said.stdout
    assert "site lab: partition, account, walltime and GPUs are available" in said.stdout
    assert re.search(r"need +site lab: Slurm refuses this script: .*(Memory|node configuration)", said.stdout), (
        said.stdout
    )
    assert slurm_jobs() == []


def test_dry_run_reports_that_slurm_does_not_answer(world, monkeypatch):
    write_site(world.path, provider={"command_limit": "1 s"})
    commands = world.path / "commands"
    commands.mkdir()
    python = Path(sys.executable)
    monkeypatch.setenv("PATH", str(commands))
    said = stoker(world, "up", "lab.toml", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "# site lab: Slurm did not check this script: no sbatch on the PATH of this host" in said.stdout
    (commands / "sbatch").write_text(f"#!{python}\nimport time; time.sleep(600)\n")
    (commands / "sbatch").chmod(0o755)
    said = stoker(world, "up", "lab.toml", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "Slurm could not check this script: sbatch has not answered for 1 s" in said.stdout


def test_up_fails_if_slurm_refuses_the_job_unless_no_wait_is_given(slurm, world):
    write_site(world.path, provider={"partition": "nowhere"})
    said = stoker(world, "up", "lab.toml")
    assert (said.returncode, said.stdout) == (1, "")
    assert "site lab: [provider] partition nowhere is not up; known partitions: " in said.stderr
    assert re.search(r"^Slurm refused the first job: .*invalid partition", said.stderr, re.I | re.M)
    assert "stoker up lab.toml --dry-run" in said.stderr
    assert "no session is up" in stoker(world, "down").stderr
    assert re.search(r"^session \w+ ended at \S+ \(Slurm refused the first job: .+\)", stoker(world, "status").stdout)
    world.empty()
    stays = stoker(world, "up", "lab.toml", "--no-wait")
    assert stays.returncode == 0, stays.stderr
    assert stoker(world, "down").returncode == 0


def test_probe_checks_that_nodes_reach_this_host_and_cleans_up(slurm, world):
    write_site(world.path)
    said = stoker(world, "doctor", "lab.toml", "--probe", "--wait", "60")
    assert re.search(r"ok +compute nodes reach this host on 127\.0\.0\.1:\d+ \(a pilot on ", said.stdout), said.stdout
    assert "submits one job of at most a minute to site lab" in said.stderr
    assert slurm_jobs() == []
    assert world.left() == []
    assert not list((world.home / "sessions.d").iterdir())


def slurm_jobs() -> list[str]:
    out = subprocess.run(["squeue", "-h", "-o", "%i"], capture_output=True, text=True, check=True, timeout=30).stdout
    return out.split()
