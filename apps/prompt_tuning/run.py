"""Run the tuning jobs of job files, in this process or a detached one, and run `stoker tune bank`.

`--detach` forks a process after the check of all jobs and before any thread starts. The forked process locks the run
folders, keeps the client of the session, and writes its lines to a log file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

import stoker
from stoker import console
from stoker.apps.common.calls import (
    INTERRUPTED,
    StoppedBySignal,
    format_session_line,
    poll_call_progress,
    raise_on_signals,
)
from stoker.apps.common.command_line import format_count
from stoker.apps.prompt_tuning import report
from stoker.apps.prompt_tuning.board import APP, CHECKPOINT, JobDisplay, JobPhase, SubmissionOptions, open_job_display
from stoker.apps.prompt_tuning.functions import build_bank
from stoker.apps.prompt_tuning.serving import add_prompt_to_models_file, check_prompt_can_be_served
from stoker.apps.prompt_tuning.submit import CheckedJob, check_job, limit_gang_to_batch, make_tuning_recipe
from stoker.apps.prompt_tuning.watch import SessionReader, SubmittedJob
from stoker.config import Site, load_site, with_default_policy
from stoker.console import Screen
from stoker.errors import ConfigError, StokerError
from stoker.run_folder import open_run
from stoker.sessions import facts_of, joined_session, policy_of
from stoker.tuning import SHIPPED_PROMPTS, BankPlace, read_candidates, read_job

if TYPE_CHECKING:
    from stoker.sessions import Session

POLICY = "prompt-tuner"
"""The policy of a new session for tuning jobs, unless the site file names another."""
_LOOK_EVERY_S = 0.5

Submission = tuple[str, list[str], str]
"""The message from a detached process to its parent: the session's id, the run folders, and an error."""
Submitted = Callable[[str, Sequence[str]], None]
"""A function that receives the session's id and the run folders."""


def submit_and_wait(
    files: Sequence[Path], options: SubmissionOptions, *, screen: Screen, json: bool, submitted: Submitted | None = None
) -> int:
    """Return the exit status: 0, 1 if a job has no result, 130 after Ctrl-C. `submitted`: called after submission."""
    readies = check_jobs(files, options)
    site = None if options.session else choose_tuning_site(options.site)
    with contextlib.ExitStack() as stack:
        jobs = [_open_job(stack, name, ready, options) for name, ready in readies.items()]
        stack.enter_context(raise_on_signals())
        try:
            with stoker.load(site, session=options.session or None, progress=False) as session:
                for line in format_headline(session, jobs):
                    screen.line(line)
                for job in jobs:
                    late = options.late if _has_deadline(job.ready) else SubmissionOptions().late
                    job.submit_to_session(session=session.id, gang=options.gang, late=late, bank=options.bank)
                if submitted is not None:
                    submitted(session.id, [str(job.folder.path) for job in jobs])
                with open_job_display(screen, drops_late_jobs=options.late == "drop", json=json) as shown:
                    follow_jobs(jobs, session, shown)
        except StoppedBySignal:
            for job in jobs:
                job.record_stop("stopped by its submitter")
            screen.line()
            screen.line("stopped: checkpoints are kept; to continue from the checkpoints, run:")
            left = [file for file, job in zip(files, jobs, strict=True) if job.entry.phase is not JobPhase.DONE]
            screen.line(f"  {format_restart_command(left, options)}")
            return INTERRUPTED
        except BaseException as error:
            for job in jobs:
                job.record_stop(f"its submitter failed: {error}")
            raise
    return _report_and_serve(jobs, options, screen=screen, json=json)


def format_restart_command(files: Sequence[Path], options: SubmissionOptions) -> str:
    plain = SubmissionOptions()
    words = list(map(str, files))
    for name in ("site", "session", "late", "out", "serve", "models"):
        if (value := getattr(options, name)) != getattr(plain, name):
            words += [f"--{name}", str(value)]
    if options.gang != plain.gang:
        words += ["--gang", "{}-{}".format(*options.gang)]
    words += ["--no-bank"] if options.bank is None else ["--bank", options.bank] if options.bank else []
    return f"stoker tune submit {shlex.join(words)}"


def check_jobs(files: Sequence[Path], options: SubmissionOptions) -> dict[str, CheckedJob]:
    """Return the jobs of these files by name, with their data. Raises ConfigError, RecipeError."""
    readies: dict[str, CheckedJob] = {}
    for file in files:
        job = read_job(file)
        name = job.name or file.stem
        if name in readies:
            raise ConfigError.in_file(file, f"two jobs are called {name}; give one of them another `name`", key="name")
        limit_gang_to_batch(job, options.gang)
        readies[name] = check_job(job)
        if options.serve:
            check_prompt_can_be_served(options, readies[name])
    if options.late == "drop" and not any(map(_has_deadline, readies.values())):
        raise ConfigError(
            f"{', '.join(map(str, files))}: --late drop has no effect on jobs without a deadline; give one of them"
            " [until] slo or deadline, or leave out --late",
            file=str(files[0]), key="deadline",
        )  # fmt: skip
    return readies


def _has_deadline(ready: CheckedJob) -> bool:
    until = ready.job.until
    return bool(until.slo_s or until.deadline)


def follow_jobs(jobs: Sequence[SubmittedJob], session: Session, shown: JobDisplay) -> None:
    asker = SessionReader(session)
    try:
        while True:
            picture = asker.read_picture()
            for job in jobs:
                job.update_state(picture)
                if job.unwritten:
                    shown.show_once(f"{job.entry.name}: {job.unwritten}; Stoker retries until it works")
            shown.show_jobs([job.entry for job in jobs])
            left = [job.future for job in jobs if job.future is not None and not job.entry.phase.is_over]
            if not left:
                return
            running = [future for future in left if not future.done()]
            if running:
                concurrent.futures.wait(running, timeout=_LOOK_EVERY_S, return_when=concurrent.futures.FIRST_COMPLETED)
            else:  # all calls have ended; retry later to write their results
                time.sleep(_LOOK_EVERY_S)
    finally:
        asker.close()


def format_headline(session: Session, jobs: Sequence[SubmittedJob]) -> Iterator[str]:
    """Yield the first output lines, with a note if the policy ignores deadlines."""
    yield format_session_line(session)
    models = {Path(job.ready.recipe.name).name for job in jobs}
    yield f"prompt tuning · {format_count(len(jobs), 'job')} · {', '.join(sorted(models))}"
    policy = policy_of(session) or "the default policy"
    if any(_has_deadline(job.ready) for job in jobs) and POLICY not in policy:
        yield (
            f"  {policy} does not support deadlines: jobs run in the order of submission."
            f' Write [policy] name = "{POLICY}" in the site file'
        )
    for job in jobs:
        if job.folder.resumed:
            yield f"  {job.entry.name} continues {job.folder.path}"


def _open_job(stack: contextlib.ExitStack, name: str, ready: CheckedJob, options: SubmissionOptions) -> SubmittedJob:
    folder = open_run(
        options.out, app=APP, parameters={"job": ready.digest, "name": name}, fresh=options.fresh,
        prefix="".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name),
        options={"gang": list(options.gang), "late": options.late, "data": ready.job.data.path},
    )  # fmt: skip
    stack.callback(folder.close)
    try:
        start = (folder.path / CHECKPOINT).read_bytes()
    except OSError:
        start = b""
    return SubmittedJob(ready, name=name, folder=folder, start=start)


def choose_tuning_site(given: str) -> Site | str | None:
    """Return the site with a default policy for tuning, or None to join the session that the environment names."""
    if not given and joined_session():
        return None
    site = load_site(given or None)
    decided = with_default_policy(site, POLICY)
    return (given or None) if decided is site else decided


def _report_and_serve(jobs: Sequence[SubmittedJob], options: SubmissionOptions, *, screen: Screen, json: bool) -> int:
    found = [one for job in jobs if (one := report.read_outcome(job.folder.path)) is not None]
    done = all(job.entry.phase is JobPhase.DONE for job in jobs)
    served, error = None, None
    if options.serve and done:
        try:
            served = add_prompt_to_models_file(options, jobs[0].ready, adapter=jobs[0].folder.path)
        except ConfigError as why:  # raise the error after the report of the results
            error = why
    if json:
        said = {"served": msgspec.to_builtins(served)} if options.serve else {}
        screen.json({"jobs": [report.job_outcome_to_json(one, now=time.time()) for one in found], **said})
    else:
        screen.line()
        for line in report.format_report(found, now=time.time()):
            screen.line(line)
    if served is not None:
        screen.line()
        screen.line(f"{served.models} has the tuned prompt as {served.name}, an adapter of {served.base}; serve it:")
        screen.line(f"  {served.command}")
    if error is not None:
        raise error
    return 0 if done else 1


def submit_detached(files: Sequence[Path], options: SubmissionOptions, *, json: bool) -> int:
    """Submit jobs from a detached process. Return 0 once they are submitted. Raises the errors of `submit_and_wait`."""
    check_jobs(files, options)
    log = options.out / f"submitted-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError.in_file(log, f"cannot be written: {error.strerror}") from None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_detached(files, options, log=descriptor, pipe=writing)
    os.close(writing)
    os.close(descriptor)
    try:
        with os.fdopen(reading, "rb") as pipe:
            heard = pipe.read()
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        raise
    nothing: Submission = "", [], f"it exited without a message; its log is {log}"
    session, folders, failure = msgspec.json.decode(heard, type=Submission) if heard else nothing
    if failure:
        raise StokerError(failure, log=str(log))
    if json:
        console.json({"session": session, "folders": folders, "pid": child, "log": str(log)})
        return 0
    jobs = format_count(len(folders), "job")
    console.line(f"{jobs} submitted to session {session}; a process here (pid {child}) waits for them")
    console.lines(f"  {folder}" for folder in folders)
    where = "" if options.out == SubmissionOptions().out else f" {options.out}"
    console.line(f"show them: stoker tune status{where}; stop them and keep their checkpoints: kill {child}")
    return 0


def _run_detached(files: Sequence[Path], options: SubmissionOptions, *, log: int, pipe: int) -> NoReturn:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for mine, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(mine, theirs)
    code = 1
    try:
        with os.fdopen(pipe, "wb") as out:

            def report_to_parent(session: str, folders: Sequence[str], error: str = "") -> None:
                if not out.closed:
                    out.write(msgspec.json.encode([session, folders, error]))
                    out.close()

            try:
                code = submit_and_wait(
                    files, options, screen=Screen(terminal=False), json=False, submitted=report_to_parent
                )
            except BaseException as error:
                console.error(f"{type(error).__name__}: {error}")
                report_to_parent("", [], str(error) or type(error).__name__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def add_prompts_to_bank(
    file: Path | None, options: SubmissionOptions, *, model: str, screen: Screen, json: bool
) -> int:
    """Add candidate prompts to a model's bank, and return 0. Raises StokerError for the bank of another model."""
    files = [SHIPPED_PROMPTS] if file is None else [SHIPPED_PROMPTS, file]
    every = {one.key: one for each in files for one in read_candidates(each)}
    recipe, identity = make_tuning_recipe(model)
    place = BankPlace.of(identity, folder=options.bank or "")
    site = None if options.session else choose_tuning_site(options.site)
    with stoker.load(site, session=options.session or None, progress=False) as session:
        screen.line(format_session_line(session))
        future = build_bank.with_options(context=recipe)(place, tuple(every.values()))
        ask = facts_of(session, {recipe.key})
        with screen.progress(total=len(every), done=0, noun="prompts", facts=ask) as progress:
            for said in poll_call_progress(future):
                progress.total = int(said.total)
                progress.advance(int(said.done) - progress.done)
        held: int = future.result()
    if json:
        screen.json({"bank": place.folder, "model": identity, "prompts": held})
    else:
        screen.line(f"{held:,} prompts in {place.folder}")
    return 0
