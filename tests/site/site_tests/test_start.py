"""A pilot starts, and calls run on it."""

from __future__ import annotations

from stoker.site_tests import on_pilot
from stoker.site_tests.promise import broken, promise
from stoker.site_tests.subject import Subject


@promise(
    "a pilot starts and runs a call",
    limit="90 s",
    remedy="run `stoker doctor SITE.toml`; `stoker up SITE.toml --dry-run` prints the submit script",
    queues=True,
)
def test_a_pilot_starts_and_runs_a_call(subject: Subject) -> None:
    subject.main()
    found = subject.result(subject.call(on_pilot.answer), within_s=60, what="the first call")
    if found != 42:
        broken(f"the first call returned {found!r}, not 42")
