"""What the user is told of a job: when it should be done, and why it is dropped."""

from __future__ import annotations

import math

from stoker.manager.core.deadlines import has_changed, is_in_time
from stoker.manager.core.seams import Action, Forecast, View
from stoker.manager.policies.prompt_tuner.scheduling import Fate
from stoker.protocol.ids import CallId
from stoker.units import show_seconds


def forecast(view: View, id: int, ends_at: float, due_at: float) -> list[Action]:
    """What is expected of a call, if that is known and has changed by more than it can be known to."""
    if ends_at == math.inf:
        return []
    ends_at = max(ends_at, view.now)
    in_time = is_in_time(ends_at, due_at=due_at, now=view.now)
    changed = has_changed(view.forecasts.get(id), ends_at, in_time=in_time, now=view.now)
    return [Forecast(CallId(id), ends_at, in_time)] if changed else []


def why_dropped(view: View, fate: Fate) -> str:
    """Why a job that cannot be in time is dropped, in words for the user."""
    left_s = fate.job.deadline_at - view.now
    if left_s <= 0:
        return f"dropped: {show_seconds(-left_s)} past its deadline"
    due = f"dropped: its deadline is in {show_seconds(left_s)}"
    if fate.ends_at == math.inf:
        return f"{due}, and it has not begun"
    soonest = show_seconds(fate.ends_at - view.now)
    return f"{due}, and it cannot be done sooner than in {soonest}: give it more time, or let it be late"
