"""A pilot ends before its walltime, and another pilot continues."""

from __future__ import annotations

from stoker.site_tests import on_pilot
from stoker.site_tests.on_pilot import Whereabouts
from stoker.site_tests.promise import broken, promise
from stoker.site_tests.subject import Subject


@promise(
    "a pilot ends before its walltime, and its calls end once",
    limit="5 min",
    remedy="raise [provider] walltime; check that the clocks of this host and of compute nodes agree",
    queues=True,
)
def test_a_pilot_ends_before_its_walltime(subject: Subject) -> None:
    session, walltime_s = subject.short()
    recipe = on_pilot.table("walltime")
    [first] = [pilot.pilot for pilot in session.status().pilots][:1]
    number, places = 0, list[Whereabouts]()

    def is_gone() -> bool:
        return all(pilot.pilot != first for pilot in session.status().pilots)

    while not is_gone() or len(places) < 1 or places[-1].same_pilot(places[0]):
        calls = [subject.call(on_pilot.beat, number + at, context=recipe) for at in range(5)]
        for call in calls:
            told, place = subject.result(call, within_s=walltime_s + subject.wait_s, what="a call near the walltime")
            if told != number:
                broken(f"call {number} returned the result of call {told}")
            places.append(place)
            number += 1
    status = session.status()
    if status.lost_pilots or status.rerun_calls:
        broken(
            f"{status.lost_pilots} pilots were lost and {status.rerun_calls} calls ran again: the walltime of"
            f" {walltime_s:g} s cut them off"
        )
