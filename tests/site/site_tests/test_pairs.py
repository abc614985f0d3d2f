"""Two pilots exchange files and run gangs, and calls of a lost pilot run again."""

from __future__ import annotations

import importlib
import os
import signal
from collections import Counter
from pathlib import Path
from types import ModuleType

from stoker.sessions import Session, Status
from stoker.site_tests import on_pilot
from stoker.site_tests.on_pilot import Whereabouts
from stoker.site_tests.promise import broken, not_tried, promise
from stoker.site_tests.subject import VARIABLE, Subject
from stoker.units import show_bytes

_FILE_BYTES = 16_000_000
_HOLD_S = 90.0
"""Seconds of a call on a pilot that will be lost."""
_NETWORK = "let compute nodes reach each other over TCP: [session] interface and ports, or a rule of the firewall"
_CALLS = 8


@promise("a file of a context travels from pilot to pilot", limit="2 min", remedy=_NETWORK, queues=True)
def test_a_file_travels_from_pilot_to_pilot(subject: Subject) -> None:
    session = subject.pair()
    file = subject.folder / "weights"
    file.write_bytes(os.urandom(_FILE_BYTES))
    recipe = on_pilot.with_file(str(file))
    subject.result(session.warm(recipe), within_s=60, what="loading a context with a file")
    devices = sum(len(pilot.devices) for pilot in session.status().pilots)
    subject.result(session.warm(recipe, devices), within_s=60, what="loading it on the other pilot")
    status = subject.until(
        lambda status: [each for each in status.objects if each.size_bytes >= _FILE_BYTES and not each.fetching],
        within_s=20,
        what="the file on both pilots",
    )
    travelled = max(status.objects, key=lambda each: each.size_bytes)
    if travelled.peer_bytes:
        return
    if _do_pilots_share_a_cache(subject, recipe, devices):
        not_tried(f"the pilots share one cache: all of them run on {', '.join(subject.machines)}")
    trouble = status.trouble.get("peers", "") or travelled.trouble
    read = show_bytes(travelled.origin_bytes)
    broken(f"{read} were read from the origin, and nothing from a pilot{f': {trouble}' if trouble else ''}")


def _do_pilots_share_a_cache(subject: Subject, recipe: object, devices: int) -> bool:
    calls = [subject.call(on_pilot.facts_of_file, context=recipe) for _ in range(4 * devices)]
    places = {subject.result(call, within_s=30, what="a call that looks at its file") for call in calls}
    return len(places) == 1


@promise("a call runs on a gang of two", limit="90 s", remedy=_NETWORK, queues=True)
def test_a_call_runs_on_a_gang_of_two(subject: Subject) -> None:
    subject.pair()
    call = subject.call(on_pilot.greet_rank, context=on_pilot.table("gang"), gang=2)
    size, said = subject.result(call, within_s=80, what="a gang of two")
    if (size, said) != (2, "rank 1"):
        broken(f"rank 0 of a gang of two saw {size} ranks and heard {said!r}")


@promise(
    "a module, a package and an environment variable reach a pilot",
    limit="90 s",
    remedy="put folders of modules on PYTHONPATH where the program starts, and set variables in [provider] worker_init",
    queues=True,
)
def test_modules_and_variables_reach_a_pilot(subject: Subject) -> None:
    subject.pair()
    beside, package = _write_user_modules(subject.folder)
    recipe = on_pilot.table("environment")
    for module, expected in ((beside, 7), (package, 11)):
        call = subject.call(module.reach, context=recipe)
        found = subject.result(call, within_s=30, what=f"a call of {module.__name__}")
        if found != expected:
            broken(f"a function of {module.__name__} returned {found!r}, not {expected}")
    call = subject.call(on_pilot.variable, VARIABLE, context=recipe)
    found = subject.result(call, within_s=30, what="a call that reads a variable")
    if found != "travels":
        broken(f"{VARIABLE}, which [provider] worker_init sets, is {found!r} on a pilot")


def _write_user_modules(folder: Path) -> tuple[ModuleType, ModuleType]:
    (folder / "site_beside.py").write_text("SEVEN = 7\n\n\ndef reach(_context):\n    return SEVEN\n")
    package = folder / "site_package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(
        "from site_package.part import ELEVEN\n\n\ndef reach(_context):\n    return ELEVEN\n"
    )
    (package / "part.py").write_text("ELEVEN = 11\n")
    importlib.invalidate_caches()
    return importlib.import_module("site_beside"), importlib.import_module("site_package")


@promise(
    "the calls of a killed pilot run again",
    limit="2 min",
    remedy="read the manager's log; `stoker explain CALL` says what became of a call",
    queues=True,
)
def test_calls_of_a_killed_pilot_run_again(subject: Subject) -> None:
    session = subject.pair()
    victim = _find_victim(subject)
    before = session.status()
    _remove_victim(subject, session, victim, how=signal.SIGKILL)
    after = subject.until(
        lambda status: status.lost_pilots > before.lost_pilots, within_s=30, what="the loss of a pilot in the status"
    )
    if after.failed > before.failed:
        broken(f"{after.failed - before.failed} calls of the killed pilot failed")
    subject.end_session_before_next_test()


@promise(
    "the calls of a preempted pilot run again",
    limit="2 min",
    remedy="read what the job printed, below submit/ in the session's folder",
    queues=True,
)
def test_calls_of_a_preempted_pilot_run_again(subject: Subject) -> None:
    session = subject.pair()
    victim = _find_victim(subject)
    before = session.status()
    _remove_victim(subject, session, victim, how=0)
    after = subject.until(
        lambda status: status.gone_pilots > before.gone_pilots, within_s=30, what="the end of a pilot in the status"
    )
    if after.failed > before.failed:
        broken(f"{after.failed - before.failed} calls of the preempted pilot failed")


def _find_victim(subject: Subject) -> Whereabouts:
    call = subject.call(on_pilot.whereabouts, context=on_pilot.table("victim"))
    found: Whereabouts = subject.result(call, within_s=60, what="a call that says where it runs")
    if not found.pilot:
        not_tried("a call cannot see the process of its pilot")
    return found


def _remove_victim(subject: Subject, session: Session, victim: Whereabouts, *, how: int) -> None:
    """Run calls on all pilots and remove the victim: each call must return from another pilot."""
    status = session.status()
    devices = sum(len(pilot.devices) for pilot in status.pilots)
    recipe = on_pilot.table("victim")
    calls = [
        subject.call(on_pilot.leave_pilot, victim, how, _HOLD_S, context=recipe)
        for _ in range(max(_CALLS, 4 * devices))
    ]
    if not how:
        subject.until(
            lambda status: _has_running_call(status, victim), within_s=60, what="a call on the pilot that is to go"
        )
        jobs = [job.job for job in session.status().jobs if job.block == victim.block]
        subject.preempt(victim, job=jobs[0] if jobs else "")
    places = [subject.result(call, within_s=100, what="a call of a pilot that went") for call in calls]
    stayed = Counter(place.same_pilot(victim) for place in places)[True]
    if stayed:
        broken(f"{stayed} calls ended on the pilot that was to go: it was still there")


def _has_running_call(status: Status, victim: Whereabouts) -> bool:
    pilots = {pilot.pilot for pilot in status.pilots if pilot.block == victim.block}
    return any(library.running for library in status.libraries if library.pilot in pilots)
