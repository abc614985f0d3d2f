"""What calls may wish for, of themselves and of their context, and which policies take it into account.

A policy names the wishes that it honours (`Dispatch.honours`, `Residency.honours`). A call with any other wish is
refused where it is made, or where it comes in: nothing is accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits
from stoker.protocol.calls import CallOptions, Features

WISHES = {
    "priority": "a priority",
    "deadline": "a deadline",
    "latency_s": "a latency",
    "ttft_s": "a time to first token",
    "tpot_s": "a time per output token",
    "variants": "other contexts that can serve a call (variants)",
    "expected_output": "features with an expected output",
    "min_libraries": "a least number of libraries of its context",
    "max_libraries": "a largest number of libraries of its context",
    "keep_alive": "a time after which an idle library of its context is unloaded",
}
"""Every wish, and what it is."""


def wished(
    options: CallOptions,
    *,
    deadline: bool = False,
    features: Features | None = None,
    limits: LibraryLimits = NO_LIMITS,
) -> Iterator[str]:
    """The wishes that calls with these options have. `deadline`: they will have one when they are sent. `limits`: what
    their program wishes of their context."""
    objective = options.objective
    has = {
        "priority": options.priority != 0,
        "deadline": deadline or objective.deadline_at > 0,
        "latency_s": objective.latency_s > 0,
        "ttft_s": objective.ttft_s > 0 or objective.ttft_per_token_s > 0,
        "tpot_s": objective.tpot_s > 0,
        "variants": bool(options.variants),
        "expected_output": features is not None and features.expected_output > 0,
        "min_libraries": limits.least > 0,
        "max_libraries": limits.most > 0,
        "keep_alive": limits.keep_alive_s is not None,
    }
    yield from (wish for wish, is_there in has.items() if is_there)


def refusal(
    options: CallOptions,
    honoured: frozenset[str],
    *,
    policy: str = "of the session",
    deadline: bool = False,
    features: Features | None = None,
    limits: LibraryLimits = NO_LIMITS,
) -> str:
    """Why calls with these options are refused; empty if the policy honours all that they wish for."""
    ignored = [
        wish for wish in wished(options, deadline=deadline, features=features, limits=limits) if wish not in honoured
    ]
    if not ignored:
        return ""
    what = ", ".join(WISHES[wish] for wish in ignored)
    able = ", ".join(WISHES[wish] for wish in WISHES if wish in honoured) or "no wish of a call"
    return (
        f"the policy {policy} does not honour {what} (it honours {able}); leave {', '.join(ignored)} away, or name a "
        "policy that does ([policy] name)"
    )
