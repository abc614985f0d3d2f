"""What has happened to the session itself is kept for `stoker status`."""

from __future__ import annotations

from collections.abc import Callable

from core.builders import Cluster

from stoker.manager.core import report
from stoker.manager.core.events import Noticed
from stoker.manager.core.state import KEPT_NOTICES
from stoker.protocol.show_status import render

Make = Callable[..., Cluster]


def test_a_notice_stands_in_status_once_with_its_last_time(cluster: Make) -> None:
    c = cluster().event(Noticed("a damaged record was set aside")).event(Noticed("the disk was full for 3 s"))
    c.now += 60
    c.event(Noticed("a damaged record was set aside"))
    notices = report.session_status(c.core.state).notices
    assert [line.text for line in notices] == ["the disk was full for 3 s", "a damaged record was set aside"]
    assert notices[1].at == c.now
    shown = [line for line in render(report.session_status(c.core.state)) if "damaged" in line or "disk" in line]
    assert len(shown) == 2
    assert shown[0].startswith("  notices ")
    assert shown[0].endswith("a damaged record was set aside")


def test_notices_are_bounded(cluster: Make) -> None:
    c = cluster()
    for number in range(KEPT_NOTICES + 5):
        c.event(Noticed(f"notice {number}"))
    assert next(line.text for line in report.session_status(c.core.state).notices) == "notice 5"
    assert len(c.core.state.notices) == KEPT_NOTICES
