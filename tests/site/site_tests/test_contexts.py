"""Contexts load once, serve many calls, and come back."""

from __future__ import annotations

from stoker.site_tests import on_pilot
from stoker.site_tests.promise import broken, promise
from stoker.site_tests.subject import Subject

_REMEDY = "read the library's log below the pilot's folder"


@promise("a context loads once and serves the next call", limit="60 s", remedy=_REMEDY)
def test_a_context_is_hot_for_the_second_call(subject: Subject) -> None:
    session = subject.main()
    recipe = on_pilot.table("hot")
    first, second = (
        subject.result(subject.call(on_pilot.loaded_in, context=recipe), within_s=30, what="a call with a context")
        for _ in range(2)
    )
    loads = next(each.loads for each in session.status().contexts if each.key == recipe.key)
    if loads != 1 or first != second or first[1] != first[2]:
        broken(f"two calls in a row needed {loads} loads (processes {first[2]} and {second[2]})")


@promise("a context returns after its library was killed", limit="60 s", remedy=_REMEDY)
def test_a_context_returns_after_its_library_was_killed(subject: Subject) -> None:
    subject.main()
    recipe = on_pilot.table("returns")
    _, victim, _ = subject.result(subject.call(on_pilot.loaded_in, context=recipe), within_s=30, what="the first call")
    kill = subject.call(on_pilot.end_library, victim, context=recipe)
    after = subject.result(kill, within_s=45, what="a call whose library was killed")
    if after == victim:
        broken(f"the library with process {victim} survived SIGKILL")
