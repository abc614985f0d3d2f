from __future__ import annotations

import pytest

from stoker.pilot.core.events import DeviceHealth, ProbeVerdict

SOUND, UNKNOWN, FAILED, WRONG = ProbeVerdict.SOUND, ProbeVerdict.UNKNOWN, ProbeVerdict.FAILED, ProbeVerdict.WRONG


def after(*answers: ProbeVerdict) -> DeviceHealth:
    health = DeviceHealth()
    for number, answer in enumerate(answers):
        before = health.fault
        changed = health.heard(answer, f"answer {number}")
        assert changed == (health.fault != before)
    return health


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([], ""),
        ([SOUND], ""),
        ([FAILED], ""),
        ([FAILED, SOUND, FAILED], ""),
        ([FAILED, FAILED], "answer 1, twice"),
        ([WRONG, FAILED], "answer 1, twice"),
        ([FAILED, UNKNOWN, FAILED], "answer 2, twice"),  # a probe that could not run does not prove health
        ([FAILED, FAILED, FAILED], "answer 1, twice"),  # the fault is reported only once
        ([FAILED, FAILED, SOUND], "answer 1, twice"),
        ([FAILED, FAILED, SOUND, SOUND], ""),
        ([FAILED, FAILED, SOUND, FAILED, SOUND], "answer 1, twice"),
        ([FAILED, FAILED, SOUND, SOUND, FAILED, FAILED], "answer 5, twice"),
        ([WRONG, WRONG, SOUND, SOUND, SOUND], "answer 1, twice"),
    ],
)
def test_probe_answers_give_the_listed_fault(answers: list[ProbeVerdict], fault: str) -> None:
    assert after(*answers).fault == fault


def test_fault_reported_by_the_driver_persists() -> None:
    health = DeviceHealth()
    assert health.reported("Xid 79")
    assert not health.reported("Xid 48")
    assert after(SOUND, SOUND).fault == ""
    for _ in range(3):
        assert not health.heard(SOUND, "")
    assert health.fault == "Xid 79"


def test_unresponsive_driver_is_a_fault_while_it_lasts() -> None:
    health = DeviceHealth()
    assert health.silent("no answer for 60 s")
    assert not health.silent("no answer for 60 s")
    assert (health.fault, health.known) == ("no answer for 60 s", True)
    assert health.silent("")
    assert health.fault == ""
    health.reported("Xid 79")
    assert not health.silent("no answer for 60 s")
    assert not health.silent("")
    assert health.fault == "Xid 79"
