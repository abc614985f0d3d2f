"""`stoker doctor`: check this machine and site files, and show how to fix problems."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click
import msgspec
import psutil

from stoker.contexts.folders import state_folder
from stoker.errors import StokerError
from stoker.manager.cli import console, doctor_machine, doctor_site, session_remains, sessions, site_suite
from stoker.manager.cli.console import Seconds
from stoker.manager.cli.doctor_machine import Finding, FindingLevel, ok, render_findings, warn
from stoker.manager.cli.session_remains import size_bytes
from stoker.manager.cli.sessions import SessionState
from stoker.manager.executor import detached, new_sessions
from stoker.manager.live import lease, node_store
from stoker.protocol import show_status
from stoker.protocol.session import SessionFolder, is_session_folder, is_starting
from stoker.units import show_bytes

# ---- earlier sessions


MEASUREMENT_FILE = "performance.sqlite"


def check_measurement_store() -> Iterator[Finding]:
    path = state_folder() / MEASUREMENT_FILE
    if not path.exists():
        yield ok(f"no measurements yet: the first run creates {path}")
        return
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            verdict = db.execute("PRAGMA quick_check").fetchone()[0]
            count = db.execute("SELECT count(DISTINCT recipe) FROM measured").fetchone()[0]
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict == "ok":
        yield ok(f"measurements of {console.format_count(count, 'context')} in {path}")
    else:
        fix = f"move the file away, and Stoker creates a new file: mv {path} {path}.damaged"
        yield warn(f"measurements cannot be read: {path}: {verdict}", fix)


def check_earlier_sessions() -> Iterator[Finding]:
    found = sessions.list_sessions()
    alive = [each.session for each in found if each.state is SessionState.UP]
    over = [Path(each.folder) for each in found if each.state is SessionState.OVER]
    links = sorted((state_folder() / "sessions").glob("*"))
    dangling = [link for link in links if not (is_session_folder(link) or is_starting(link))]
    yield ok(": ".join(filter(None, [console.format_count(len(alive), "live session"), ", ".join(alive)])))
    for name in (each.session for each in found if each.state is SessionState.LOST):
        fix = f"restart the session's manager: stoker attach {name}; or end the session: stoker down {name}"
        yield warn(f"session {name} is not over, but has no manager", fix)
    if over:
        size = sum(map(size_bytes, over))
        text = f"{console.format_count(len(over), 'ended session')} with {show_bytes(size)} of logs and journals"
        fix = "stoker sessions --prune removes the old ones"
        yield Finding(FindingLevel.OK if size < 1e9 else FindingLevel.WARN, text, fix)
    if dangling:
        text = f"{console.format_count(len(dangling), 'link')} to sessions whose folders are gone"
        yield warn(text, "rm " + " ".join(map(str, dangling)))


# ---- excluded nodes


def check_excluded_nodes() -> Iterator[Finding]:
    found = node_store.excluded_nodes()
    if not found:
        yield ok("no node is excluded because its devices failed")
    for record in found:
        fix = f"after the repair: stoker doctor --clear {record.node} (a probe without a fault also clears the node)"
        yield warn(f"no block starts on node {show_status.describe_excluded_node(record)}", fix)


# ---- processes and jobs of ended sessions


_RECHECK_AFTER_S = 3.0
"""Seconds after which processes without a session are checked again, because the session may be about to end them."""


def check_orphaned_processes() -> Iterator[Finding]:
    found = list(find_orphaned_processes())
    if not found:
        yield ok("no process was left behind")
        return
    what = ", ".join(f"{kind} {pid} of {folder}" for pid, kind, folder in found)
    yield warn(f"left behind: {what}", " ".join(["kill", *(str(pid) for pid, _, _ in found)]))


def check_orphaned_jobs() -> Iterator[Finding]:
    for link in sorted((state_folder() / "sessions").glob("*")):
        folder = SessionFolder(link.resolve())
        if folder.end_reason() and session_remains.may_have_jobs(folder):
            for each in session_remains.find_jobs(folder, None):
                yield warn(f"left behind: {each.what}, of session {link.name}", each.remove)


def find_orphaned_processes() -> Iterator[tuple[int, str, Path]]:
    """Yield pid, kind and session folder of each process whose session has ended."""
    found = list(session_remains.iter_own_session_processes())
    gone = _ended_session_folders(found)
    if any(path.exists() for path in gone):
        time.sleep(_RECHECK_AFTER_S)
        gone &= _ended_session_folders(found)
    yield from ((process.pid, kind, path) for process, kind, path in found if path in gone and process.is_running())


def _ended_session_folders(found: Sequence[tuple[psutil.Process, str, Path]]) -> set[Path]:
    managed = {path for process, kind, path in found if kind == "manager" and process.is_running()}
    gone = set[Path]()
    for path in {path for _, _, path in found}:
        folder = SessionFolder(path)
        died = False
        with contextlib.suppress(OSError, StokerError):
            holder = lease.read_lease(folder.lease)
            died = holder is not None and lease.is_holder_alive(holder) is False and not detached.is_detached(folder)
        if not path.exists() or folder.end_reason() or (path not in managed and died):
            gone.add(path)
    return gone


class Check(msgspec.Struct, frozen=True):
    name: str
    question: str
    run: Callable[[], Iterable[Finding]]


CHECKS = (
    Check("python", "Which Python runs Stoker?", doctor_machine.check_python),
    Check("packages", "Are the packages that Stoker and its extras need installed?", doctor_machine.check_packages),
    Check("models", "Is the default model installed?", doctor_machine.check_default_model),
    Check(
        "batch_system", "Which batch system is here, and what may this user request?", doctor_site.check_batch_system
    ),
    Check(
        "devices", "Which devices, memory and cores would a pilot on this machine offer?", doctor_machine.check_devices
    ),
    Check("torch_and_driver", "Can the installed torch use the GPU driver?", doctor_machine.check_torch_and_driver),
    Check("disks", "Do measurements, snapshots and caches have disk space?", doctor_machine.check_disk_space),
    Check("limits", "May a manager open enough files?", doctor_machine.check_open_file_limit),
    Check("sockets", "Do encrypted messages pass over loopback?", doctor_machine.check_encrypted_sockets),
    Check("clock", "Does the disk's clock agree with this machine's clock?", doctor_machine.check_clock),
    Check("store", "Can the measurements of earlier runs be read?", check_measurement_store),
    Check("nodes", "Which nodes are excluded because their devices failed?", check_excluded_nodes),
    Check("sessions", "Which sessions are known here, and how much disk do they use?", check_earlier_sessions),
    Check("processes", "Do processes of ended sessions still run here?", check_orphaned_processes),
    Check("jobs", "Do batch systems still have jobs of ended sessions?", check_orphaned_jobs),
)


_PROBE_LIMIT_S = 300.0


@click.command(short_help="Check this machine and site files; show fixes.")
@click.argument("sites", nargs=-1, metavar="[SITE]...", type=click.Path(path_type=Path))
@click.option("--probe", is_flag=True, help="Submit a one-minute pilot to each SITE: do compute nodes reach this host?")
@click.option("--tests", is_flag=True, help="Run the site suite on each SITE and report which checks pass.")
@click.option("-k", "chosen", metavar="EXPR", default="", help="With --tests: the tests to run, as for pytest -k.")
@click.option("--wait", "wait_s", metavar="S", type=Seconds(), help="Seconds to wait for a pilot. [300]")
@click.option("--clear", "cleared", metavar="NODE", help="Let blocks start on an excluded node again; do nothing else.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
def doctor(
    *,
    sites: tuple[Path, ...],
    probe: bool,
    tests: bool,
    chosen: str,
    wait_s: float | None,
    cleared: str | None,
    as_json: bool,
) -> None:
    """Check this machine, and show how to fix problems. The exit code is 1 if Stoker needs something that is missing.

    With SITE files: also check that they fit this cluster. With --tests: start pilots of each SITE and test each
    promise of Stoker; the exit code is 1 if a promise fails.
    """
    option = "--tests" if tests else "--probe"
    wrong = {
        f"{option} needs a site file, which describes the job: stoker doctor site.toml {option}": (
            (probe or tests) and not sites
        ),
        "--probe and --tests: use only one of these options; the site suite starts pilots, too": probe and tests,
        "--wait is for --probe and --tests: stoker doctor site.toml --probe --wait 600": (
            wait_s is not None and not (probe or tests)
        ),
        "-k is for --tests: stoker doctor site.toml --tests -k peer": chosen and not tests,
        "--clear takes one node and nothing else: stoker doctor --clear n2": cleared is not None and (sites or as_json),
    }
    for text, is_wrong in wrong.items():
        if is_wrong:
            raise click.UsageError(text)
    if cleared is not None:
        later = f"running sessions notice the change within {node_store.CHECK_CHANGES_S:g} s"
        for record in node_store.allow_node_again(cleared):
            console.line(f"blocks of site {record.source} may start on {cleared} again; {later}")
        return
    wanted = new_sessions.load_listed_sites(sites) if sites else ()
    if tests:
        _run_site_suites(sites, wait_s=wait_s, chosen=chosen, as_json=as_json)
        return
    ask = functools.partial(
        doctor_site.probe_site, wait_s=_PROBE_LIMIT_S if wait_s is None else wait_s, say=console.note
    )
    questions = [("site", "Does site {} fit this cluster?", doctor_site.check_site_file)]
    questions += [("probe", "Do pilots of {} reach this host?", ask)] if probe else []
    checks = [
        Check(f"{name} {site.name}", question.format(site.name), functools.partial(run, site))
        for name, question, run in questions
        for site in wanted
    ]
    findings = list(run_checks([*CHECKS, *checks]))
    if as_json:
        console.json({"findings": findings})
    else:
        console.lines(render_findings(findings, sites=[str(path) for path in sites]))
    if any(finding.level is FindingLevel.NEED for finding in findings):
        raise click.exceptions.Exit(1)


def _run_site_suites(sites: Iterable[Path], *, wait_s: float | None, chosen: str, as_json: bool) -> None:
    reports = []
    for site in sites:
        reports.append(site_suite.run_site_suite(site, wait_s=wait_s, chosen=chosen))
        if not as_json:
            console.lines(["", *site_suite.render_report(reports[-1])])
        if reports[-1].interrupted:
            break
    if as_json:
        console.json({"sites": reports})
    if not all(report.has_passed for report in reports):
        raise click.exceptions.Exit(1)


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    for check in checks:
        try:
            for finding in check.run():
                yield msgspec.structs.replace(finding, topic=check.name)
        except Exception as error:
            what = f"{check.name} could not be checked ({check.question})"
            yield Finding(FindingLevel.WARN, f"{what}: {type(error).__name__}: {error}", topic=check.name)
