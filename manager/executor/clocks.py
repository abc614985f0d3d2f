"""Converts times of the manager's clock to the program's clock."""

from __future__ import annotations

import msgspec

from stoker.protocol.calls import CallForecast
from stoker.protocol.to_client import Forecasts


def on_this_clock(said: Forecasts, *, now: float) -> list[CallForecast]:
    """The manager's forecasts, with times on the clock that shows `now`. The time that the message took is ignored."""
    ahead_s = now - said.said_at if said.said_at else 0.0
    return [msgspec.structs.replace(each, ends_at=each.ends_at + ahead_s) for each in said.forecasts]
