"""Counts failed calls by function, exception and line, for `stoker calls`: a day may bring thousands of one kind.

Every failure of the session is counted, also those whose stories are not kept any more. A group names its last call as
an example, because the story of that one is kept longest.
"""

from __future__ import annotations

import re
from signal import Signals

from stoker.manager.core.nouns import Call, CountedFailures
from stoker.manager.core.state import State
from stoker.protocol.calls import CallEnd, FailureGroup
from stoker.protocol.ids import CallId, show_call
from stoker.units import first_words

MOST = 200
"""Groups that are told apart. Failures of further kinds are counted together."""
_OTHERS = ("", "other failures", "")
_EXCEPTION = re.compile(r"(?P<kind>[\w.]{1,100})(?::|$|\s)")
_MOST_CHARACTERS = 300

Key = tuple[str, str, str]


def count(state: State, call: Call, outcome: CallEnd) -> None:
    """A call has failed."""
    groups, key = state.failure_groups, _key(call, outcome)
    if key not in groups and len(groups) >= MOST:
        key = _OTHERS
    group = groups.setdefault(key, CountedFailures(state.now))
    group.count += 1
    group.last_at, group.call = state.now, call.id
    said = outcome.raised if outcome.failure is None else outcome.failure.message
    group.message = first_words(said)[:_MOST_CHARACTERS]


def forget(state: State, call: Call | None, outcome: CallEnd) -> None:
    """A failure that was counted does not count: its call had ended before."""
    groups = state.failure_groups
    if call is None:
        return
    key = _key(call, outcome)
    key = key if key in groups else _OTHERS
    if key in groups:
        groups[key].count -= 1
        if not groups[key].count:
            del groups[key]


def listed(state: State) -> tuple[FailureGroup, ...]:
    """The groups, the largest first."""
    return tuple(
        FailureGroup(
            function=function,
            error=error,
            place=place,
            count=group.count,
            example=show_call(CallId(group.call)),
            message=group.message,
            first_s=state.now - group.first_at,
            last_s=state.now - group.last_at,
        )
        for (function, error, place), group in sorted(state.failure_groups.items(), key=lambda item: -item[1].count)
    )


def _key(call: Call, outcome: CallEnd) -> Key:
    """The function, what was raised (or how the call was ended), and the innermost line of the user's code."""
    failure, function = outcome.failure, call.group.function.name
    if failure is not None:
        how = _signal(failure.signal) if failure.signal else f"exit code {failure.exit_code}"
        more = f" ({how})" if failure.signal or failure.exit_code else ""
        return function, f"{failure.kind.value}{more}", ""
    said, *places = outcome.raised.splitlines() or [""]
    found = _EXCEPTION.match(said)
    place = next((line.strip()[3:] for line in reversed(places) if line.strip().startswith("at ")), "")
    return function, found["kind"] if found is not None else "an exception", place


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
