"""The memory of the manager depends on open work, not on past work."""

from __future__ import annotations

from core.builders import Make

from stoker.manager.core import report
from stoker.manager.core.events import Noticed
from stoker.manager.core.nouns import KEPT_CALL_NOTES
from stoker.manager.core.state import KEPT_NOTICES, KEPT_REFUSALS
from stoker.protocol.show_status import render


def test_number_of_refusal_kinds_is_bounded(cluster: Make) -> None:
    c = cluster()
    for number in range(1000):
        c.core.state.count_refusal(f"plan number {number}")
    c.core.state.count_refusal("plan number 3")
    refused = c.core.state.refused
    c.by_hand = True
    assert len(refused) <= KEPT_REFUSALS + 1
    assert refused["plan number 3"] == 2
    assert sum(refused.values()) == 1001


def test_call_keeps_its_first_and_last_notes(cluster: Make) -> None:
    c = cluster().call("1")
    call = c.core.state.calls[c.ids["1"]]
    for number in range(1000):
        call.note(float(number), f"note {number}")
    c.by_hand = True
    assert len(call.notes) == KEPT_CALL_NOTES
    assert call.notes[0][1] == "note 0"
    assert call.notes[-1][1] == "note 999"


def test_notice_appears_once_in_status_with_its_last_time(cluster: Make) -> None:
    c = cluster().event(Noticed("a damaged record was set aside")).event(Noticed("the disk was full for 3 s"))
    c.now += 60
    c.event(Noticed("a damaged record was set aside"))
    notices = report.build_session_status(c.core.state).notices
    assert [line.text for line in notices] == ["the disk was full for 3 s", "a damaged record was set aside"]
    assert notices[1].at == c.now
    shown = [line for line in render(report.build_session_status(c.core.state)) if "damaged" in line or "disk" in line]
    assert len(shown) == 2
    assert shown[0].startswith("  notices ")
    assert shown[0].endswith("a damaged record was set aside")


def test_number_of_notices_is_bounded(cluster: Make) -> None:
    c = cluster()
    for number in range(KEPT_NOTICES + 5):
        c.event(Noticed(f"notice {number}"))
    assert next(line.text for line in report.build_session_status(c.core.state).notices) == "notice 5"
    assert len(c.core.state.notices) == KEPT_NOTICES
