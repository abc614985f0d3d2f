"""Jobs from their files to their results: checked, submitted together, watched, and written into their run folders.

Everything that can be wrong with a job's file, its data or its model's path is said before anything is submitted. From
then on each job is for itself: one that fails ends none of the others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import stoker
from stoker.apps.common.calls import Stopped, session_line, stop_on_signals
from stoker.apps.common.hints import count
from stoker.apps.prompt_tuning import report
from stoker.apps.prompt_tuning.board import APP, CHECKPOINT, Phase
from stoker.apps.prompt_tuning.display import Display, display
from stoker.apps.prompt_tuning.options import SubmissionOptions
from stoker.apps.prompt_tuning.submission import SubmittedJob
from stoker.apps.prompt_tuning.submit import CheckedJob, check, fit_gang
from stoker.apps.prompt_tuning.watch import Asker
from stoker.config import Site, decided_by, load_site
from stoker.console import Screen
from stoker.errors import ConfigError
from stoker.run_folder import open_run
from stoker.sessions import joined_session, policy_of
from stoker.tuning import read_job

if TYPE_CHECKING:
    from stoker.sessions import Session

POLICY = "prompt-tuner"
"""Who decides in a session that is started for tuning jobs, unless its site file names somebody."""
INTERRUPTED = 130
_LOOK_EVERY_S = 0.5

Submitted = Callable[[str, Sequence[str]], None]
"""Takes the session's id and the run folders."""


def submit(
    files: Sequence[Path], options: SubmissionOptions, *, screen: Screen, json: bool, submitted: Submitted | None = None
) -> int:
    """Submit these jobs and wait for them. 0; 1 if one of them has no result; 130 after Ctrl-C (checkpoints are kept).
    `submitted` is told when all of them are.

    Raises ConfigError for what is wrong with a job, its data or an option, before anything is submitted; RecipeError
    for a model that is not there; SessionError for a session that cannot be started or joined.
    """
    readies = checked(files, options)
    site = None if options.session else site_of(options.site)
    with contextlib.ExitStack() as stack:
        jobs = [_open(stack, name, ready, options) for name, ready in readies.items()]
        stack.enter_context(stop_on_signals())
        try:
            with stoker.load(site, session=options.session or None, progress=False) as session:
                for line in headline(session, jobs):
                    screen.line(line)
                for job in jobs:
                    late = options.late if _is_due(job.ready) else SubmissionOptions().late
                    job.submit(session=session.id, gang=options.gang, late=late, bank=options.bank)
                if submitted is not None:
                    submitted(session.id, [str(job.folder.path) for job in jobs])
                with display(screen, drops=options.late == "drop", json=json) as shown:
                    follow(jobs, session, shown)
        except Stopped:
            for job in jobs:
                job.stop("stopped by whoever submitted it")
            screen.line()
            screen.line("stopped: checkpoints are kept; this goes on from them:")
            left = [file for file, job in zip(files, jobs, strict=True) if job.entry.phase is not Phase.DONE]
            screen.line(f"  {again(left, options)}")
            return INTERRUPTED
        except BaseException as error:
            for job in jobs:
                job.stop(f"its submitter failed: {error}")
            raise
    return _finish(jobs, screen=screen, json=json)


def again(files: Sequence[Path], options: SubmissionOptions) -> str:
    """The command that goes on with the jobs of these files: with every option but `--fresh`, which begins anew."""
    plain = SubmissionOptions()
    least, most = options.gang
    named = {
        "--site": (options.site, plain.site),
        "--session": (options.session, plain.session),
        "--gang": (f"{least}-{most}", "{}-{}".format(*plain.gang)),
        "--late": (options.late, plain.late),
        "--bank": (options.bank or "", plain.bank),
        "--out": (str(options.out), str(plain.out)),
    }
    words = [word for name, (value, default) in named.items() if value != default for word in (name, value)]
    bank = ["--no-bank"] if options.bank is None else []
    return f"stoker tune submit {shlex.join([*map(str, files), *words, *bank])}"


def checked(files: Sequence[Path], options: SubmissionOptions) -> dict[str, CheckedJob]:
    """The jobs of these files by name, each with its data. Raises ConfigError, RecipeError."""
    readies: dict[str, CheckedJob] = {}
    for file in files:
        job = read_job(file)
        name = job.name or file.stem
        if name in readies:
            raise ConfigError(
                f"{file}: two jobs are called {name}; give one of them another `name`", file=str(file), key="name"
            )
        fit_gang(job, options.gang)
        readies[name] = check(job)
    if options.late == "drop" and not any(map(_is_due, readies.values())):
        raise ConfigError(
            f"{', '.join(map(str, files))}: --late drop is of no use for jobs without a deadline; give one of them"
            " [until] slo or deadline, or leave --late out",
            file=str(files[0]), key="deadline",
        )  # fmt: skip
    return readies


def _is_due(ready: CheckedJob) -> bool:
    until = ready.job.until
    return bool(until.slo_s or until.deadline)


def follow(jobs: Sequence[SubmittedJob], session: Session, shown: Display) -> None:
    """Watch the jobs until the last of them is over."""
    asker = Asker(session)
    try:
        while True:
            picture = asker.ask()
            for job in jobs:
                job.refresh(picture)
                if job.unwritten:
                    shown.tell(f"{job.entry.name}: {job.unwritten}; this is tried until it works")
            shown.show([job.entry for job in jobs])
            left = [job.future for job in jobs if job.future is not None and not job.entry.phase.is_over]
            if not left:
                return
            running = [future for future in left if not future.done()]
            if running:
                concurrent.futures.wait(running, timeout=_LOOK_EVERY_S, return_when=concurrent.futures.FIRST_COMPLETED)
            else:  # a result cannot be written
                time.sleep(_LOOK_EVERY_S)
    finally:
        asker.close()


def headline(session: Session, jobs: Sequence[SubmittedJob]) -> Iterator[str]:
    """What is said first: where they run, how many they are, and whether anybody looks at their deadlines."""
    yield session_line(session)
    models = {Path(job.ready.recipe.name).name for job in jobs}
    yield f"prompt tuning · {count(len(jobs), 'job')} · {', '.join(sorted(models))}"
    policy = policy_of(session) or "the default policy"
    if any(_is_due(job.ready) for job in jobs) and POLICY not in policy:
        yield (
            f"  {policy} decides here, and knows no deadlines: jobs run in the order in which they came."
            f' [policy] name = "{POLICY}" in its site file would'
        )
    for job in jobs:
        if job.folder.resumed:
            yield f"  {job.entry.name} goes on with {job.folder.path}"


def _open(stack: contextlib.ExitStack, name: str, ready: CheckedJob, options: SubmissionOptions) -> SubmittedJob:
    folder = open_run(
        options.out,
        app=APP,
        prefix="".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name),
        parameters={"job": ready.digest, "name": name},
        options={"gang": list(options.gang), "late": options.late, "data": ready.job.data.path},
        fresh=options.fresh,
    )
    stack.callback(folder.close)
    try:
        start = (folder.path / CHECKPOINT).read_bytes()
    except OSError:
        start = b""
    return SubmittedJob(ready, name=name, folder=folder, start=start)


def site_of(given: str) -> Site | str | None:
    """The site to load, deciding as tuning wants it where nobody has said otherwise; None: the session that the
    environment names."""
    if not given and joined_session():
        return None
    site = load_site(given or None)
    decided = decided_by(site, POLICY)
    return (given or None) if decided is site else decided


def _finish(jobs: Sequence[SubmittedJob], *, screen: Screen, json: bool) -> int:
    """Report what came of them."""
    outcomes = [report.read_outcome(job.folder.path) for job in jobs]
    found = [one for one in outcomes if one is not None]
    if json:
        screen.json({"jobs": [report.facts(one, now=time.time()) for one in found]})
    else:
        screen.line()
        for line in report.render(found, now=time.time()):
            screen.line(line)
    return 0 if all(job.entry.phase is Phase.DONE for job in jobs) else 1
