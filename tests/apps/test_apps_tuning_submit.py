import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.command_line import Stoker
from gateway.running import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "peft")),
        reason="needs torch, transformers and peft",
    ),
]

import stoker  # noqa: E402
from stoker.apps.common.models_file import make_recipe_from_settings, read_models  # noqa: E402
from stoker.apps.prompt_tuning import tune  # noqa: E402
from stoker.apps.prompt_tuning.board import APP, JobPhase, read_board  # noqa: E402
from stoker.apps.prompt_tuning.submit import check_job  # noqa: E402
from stoker.apps.prompt_tuning.watch import SubmittedJob  # noqa: E402
from stoker.errors import CallDroppedError, ConfigError  # noqa: E402
from stoker.run_folder import open_run  # noqa: E402
from stoker.tuning.bank.candidates import SHIPPED_PROMPTS, read_candidates  # noqa: E402
from stoker.tuning.job import parse_job, read_job  # noqa: E402

LIMIT_S = 180
JOB = """
model = "model"
[data]
path = "pairs.jsonl"
[prompt]
initial = "{initial}"
[until]
metric = "loss"
iterations = {iterations}
evaluate_every = 5
{until}
[training]
batch = 8
learning_rate = 0.05
checkpoint_every = "200 ms"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    from tuning import tiny

    folder = tmp_path_factory.mktemp("tune")
    tiny.put_into(folder)
    (folder / "site.toml").write_text('[pilot]\ndevices = "cpu:2"\n[policy]\nname = "prompt-tuner"\n')
    return folder


@pytest.fixture(scope="module", autouse=True)
def session(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_HOME", str(place / "home"))
        with stoker.load(place / "site.toml", run_dir=str(place / "runinfo"), progress=False) as session:
            # The session has measured the duration of a job.
            tune(read_job(write(place, "first")), bank=None).result(LIMIT_S)
            yield session


def job_text(*, initial="say yes or no", iterations=20, until=""):
    return JOB.format(initial=initial, iterations=iterations, until=until)


def write(place, name, **job):
    path = place / f"{name}.toml"
    path.write_text(f'name = "{name}"' + job_text(**job))
    return str(path)


def command(place, session, *arguments):
    return [sys.executable, "-m", "stoker.manager.cli.main", "tune", *arguments, "--session", session.id]


def stoker_tune(place, session, *arguments, code=0):
    done = subprocess.run(
        command(place, session, *arguments), cwd=place, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def submitted(session, file, *, late="run"):
    path = Path(file)
    folder = open_run(path.parent / "runs", app=APP, prefix=path.stem, parameters={}, options={}, fresh=True)
    submission = SubmittedJob(check_job(read_job(file)), name=path.stem, folder=folder, start=b"")
    submission.submit_to_session(session=session.id, gang=(1, 1), late=late, bank=None)
    return submission


def test_tune_function_returns_a_future_of_the_tuned_prompt(place):
    future = tune(read_job(write(place, "api", initial="", until='slo = "10 min"')))
    tuned = future.result(LIMIT_S)
    assert tuned.iterations == 20
    assert tuned.initial_from.startswith("the bank (loss ")
    assert tuned.held_out.loss < tuned.points[0].loss
    assert 1 <= tuned.devices <= 2
    with pytest.raises(ConfigError, match="deadline = 2020"):
        tune(parse_job(job_text(until="deadline = 2020-01-01T00:00:00Z"), file="x", folder=place, now_s=0.0))


def test_submitted_jobs_succeed_and_fail_independently(place, session):
    files = [
        write(place, "good", until='slo = "10 min"'),
        write(place, "late", iterations=50, until='slo = "100 ms"'),
        write(place, "long", initial="word " * 80),
    ]
    done = stoker_tune(place, session, "submit", *files, "--gang", "1-2", "--json", code=1)
    jobs = {job["job"]["name"]: job for job in json.loads(done.stdout)["jobs"]}
    assert jobs["good"]["in_time"] is True
    assert jobs["good"]["result"]["iterations"] == 20
    assert jobs["late"]["in_time"] is False
    assert jobs["late"]["job"]["phase"] == "done", "the job runs although it is late"
    # the message depends on whether the forecast or the deadline comes first
    told = r"late (cannot meet its deadline|is late: its deadline, [0-9:]+, has passed)"
    assert re.search(told, done.stderr), done.stderr
    assert "; late: it had 0.1 s" in jobs["late"]["why"]
    assert "; that was known after " in jobs["late"]["why"]
    assert re.search(r"ran .* on \d devices?: .*\b50 iterations of ", jobs["late"]["why"]), jobs["late"]["why"]
    assert jobs["long"]["job"]["phase"] == "failed"
    assert "initial has 400 tokens, and the model accepts at most 256 tokens" in jobs["long"]["why"]
    folder = place / jobs["good"]["folder"]
    assert {"adapter_model.safetensors", "adapter_config.json", "tuned.json", "results.jsonl"} <= set(
        os.listdir(folder)
    )
    assert len((folder / "results.jsonl").read_text().splitlines()) == 5
    with contextlib.chdir(place):
        shown = Stoker().ok("tune", "report").stdout
    assert " deadlines met" in shown
    assert "  long   failed: no tuned prompt" in shown


def written(model, prompt, names):
    return [model.complete(prompt, max_new_tokens=8, adapter=name).text for name in names]


def test_tuned_prompt_is_served_under_its_name(place, session):
    (place / "models.toml").write_text('[models.tiny]\npath = "model"\n')
    file = write(place, "facts", initial="say yes or no, 12345", iterations=10)
    said = json.loads(stoker_tune(place, session, "submit", file, "--serve", "facts", "--json").stdout)
    command = f"stoker serve --session {session.id} models.toml"
    assert said["served"] == {"name": "facts", "base": "tiny", "models": "models.toml", "command": command}
    models = read_models(place / "models.toml")
    assert models["facts"].adapter == str(place / said["jobs"][0]["folder"])
    call = stoker.app(context=make_recipe_from_settings(models["facts"]))(written)
    plain, tuned = call("aaa 1", ("", "facts")).result(LIMIT_S)
    assert plain != tuned
    with contextlib.chdir(place):
        again = Stoker()("tune", "submit", file, "--serve", "facts", "--session", session.id)
    assert "models.toml: [models.facts] exists; give --serve another name" in str(again.exception)


def test_late_tuning_job_is_dropped_if_late_is_set_to_drop(place, session):
    submission = submitted(session, write(place, "drop", iterations=50, until='slo = "100 ms"'), late="drop")
    with pytest.raises(CallDroppedError):
        submission.future.result(LIMIT_S)
    submission.update_state(None)
    submission.folder.close()
    assert submission.entry.phase is JobPhase.DROPPED


@pytest.mark.long
def test_stopped_detached_job_continues_when_resubmitted(place, session):
    file = write(place, "away", iterations=3000)
    said = json.loads(stoker_tune(place, session, "submit", file, "--detach", "--json", "--out", "away").stdout)
    folder = place / said["folders"][0]
    until((folder / "checkpoint").exists, why="the job has left a checkpoint")
    status = [sys.executable, "-m", "stoker.manager.cli.main", "tune", "status", "away"]
    until(
        lambda: "1 tuning job: 1 tuning" in subprocess.run(status, cwd=place, capture_output=True, text=True).stdout,
        why="the submitter has reported that the job runs",
    )
    os.kill(said["pid"], signal.SIGTERM)
    until(lambda: read_board(place / "away")[0].entry.phase is JobPhase.STOPPED, why="the job has stopped")
    stopped = read_board(place / "away")[0].entry
    log = Path(said["log"]) if os.path.isabs(said["log"]) else place / said["log"]
    until(
        lambda: f"stoker tune submit {file} --session {session.id} --out away" in log.read_text(),
        why="the log gives the command to continue",
    )
    write(place, "away", iterations=stopped.iteration + 10)
    until(lambda: not os.path.exists(f"/proc/{said['pid']}"), why="the submitter's process has ended")
    again = json.loads(stoker_tune(place, session, "submit", file, "--json", "--out", "away").stdout)["jobs"]
    assert [job["folder"] for job in again] == said["folders"]
    assert again[0]["result"]["iterations"] == stopped.iteration + 10
    assert again[0]["job"]["seen_iteration"] > 0
    assert not (folder / "checkpoint").exists()
    assert not read_board(place / "away")[0].abandoned


@pytest.mark.long
def test_prompts_of_a_file_are_put_into_a_bank(place, session):
    (place / "mine.jsonl").write_text('{"text": "Say yes or no, please."}\n')
    options = ["mine.jsonl", "--model", "model", "--bank", "own", "--json"]
    said = json.loads(stoker_tune(place, session, "bank", *options).stdout)
    assert said["bank"] == str(place / "own")
    assert said["prompts"] == len(read_candidates(SHIPPED_PROMPTS)) + 1
    tuned = tune(read_job(write(place, "banked", initial="", iterations=1)), bank=place / "own").result(LIMIT_S)
    assert f"{said['prompts']} scored" in tuned.initial_from


@pytest.mark.long
def test_temporarily_unwritable_run_folder_loses_no_result(place, session):
    submission = submitted(session, write(place, "nowhere", iterations=2))
    folder = submission.folder
    submission.future.result(LIMIT_S)
    aside = folder.path.rename(place / "aside")
    folder.path.write_text("a file where the folder was")
    submission.update_state(None)
    assert "cannot be written" in submission.unwritten
    assert not submission.entry.phase.is_over
    folder.path.unlink()
    aside.rename(folder.path)
    submission.update_state(None)
    folder.close()
    assert submission.unwritten == ""
    assert submission.entry.phase is JobPhase.DONE
    (entry,) = [one.entry for one in read_board(folder.path)]
    assert entry.phase is JobPhase.DONE
