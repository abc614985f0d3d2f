"""Times of the manager's clock, on that of the program."""

from __future__ import annotations

import msgspec

from stoker.manager.protocol.calls import CallForecast
from stoker.manager.protocol.to_client import Forecasts


def on_this_clock(said: Forecasts, *, now: float) -> list[CallForecast]:
    """What the manager expects, with times on the clock that shows `now`. The message's own way is not counted."""
    ahead_s = now - said.said_at if said.said_at else 0.0
    return [msgspec.structs.replace(each, ends_at=each.ends_at + ahead_s) for each in said.forecasts]
