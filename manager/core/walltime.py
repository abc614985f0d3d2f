"""What fits before a pilot's walltime is over: calls get no pilot on which they could not finish.

A pilot says how much of its walltime is left. It is drained `margin_s` before the end: long enough for a call that it
runs to finish, as far as calls of its contexts have taken until now, and for its objects to be handed on. Until then a
call that is expected to run longer than what is left is kept from it (`has_time`), unless no pilot could ever give it
more: then one that has all its time still before it may try.
"""

from __future__ import annotations

from stoker.manager.core.nouns import Library, Pilot

MARGIN_S = 20.0
"""What is left of a walltime when a pilot of short calls is drained."""

CAUTION = 1.5
"""A call is taken to run this much longer than the mean."""


def has_time(now: float, library: Library, run_s: float) -> bool:
    """Whether a call that usually runs so long would be done before the library's pilot ends."""
    pilot = library.pilot
    if not pilot.ends_at:
        return True
    needs = CAUTION * run_s + _GRACE_S
    left = pilot.ends_at - now
    return left >= needs or (needs > pilot.lasts_s and left > 0.9 * pilot.lasts_s)


def near_end(pilot: Pilot, now: float) -> bool:
    """True if the walltime of a pilot is over, or about to be."""
    slack_s = min(SLACK_S, _SLACK_PART * pilot.lasts_s)
    return bool(pilot.ends_at) and pilot.ends_at - now <= slack_s


SLACK_S = 60.0
"""A pilot that goes so long before the end of its walltime goes because of it; of a short walltime a quarter."""
_SLACK_PART = 0.25
_GRACE_S = 2.0
MOST_OF_IT = 0.25
"""The margin is no more than this part of the whole time, so that short jobs do some work."""


def margin_s(lasts_s: float, *, run_s: float) -> float:
    """How long before its end a pilot is drained that lasts so long in all and whose calls run so long."""
    return min(max(MARGIN_S, CAUTION * run_s + _GRACE_S), MOST_OF_IT * lasts_s)
