"""What the engines on a device compute, as far as the manager can tell: enough to choose a device for a new instance.

The pilot weighs each offered call by what its engines have to do at that moment
(`stoker.pilot.core.turns`).
The manager knows less: how many calls a library holds, how long their prompts are and what such calls write in the
mean. Before it loads an instance somewhere, it checks with that what the pilot would refuse later: whether the prompt
can be read in time there (which excludes CPUs that are too slow, SLINFER §V), and whether a decode step of every
instance on the device still fits into a time per output token (case 3 of §VI-C).
"""

from __future__ import annotations

import math

from stoker.contexts.step_times import StepSeconds, StepTimes
from stoker.manager.core.nouns import Call, CallState, Context, Device, Library, LibraryState
from stoker.manager.core.seams import View
from stoker.pilot.core.turns import OVERESTIMATE


def prompt_tokens(call: Call) -> int:
    """Tokens that a call reads."""
    features = call.spec.features
    return max(1, features.input_length) if features is not None else 1


def output_tokens(call: Call) -> int:
    """Tokens that a call is expected to write: the mean of its context's calls that have ended (SLINFER §VII-A)."""
    features = call.spec.features
    return features.expected_output if features is not None else 0


def staying(device: Device) -> list[Library]:
    """The libraries of a device that are not about to end."""
    return [library for library in device.libraries.values() if library.state is not LibraryState.STOPPING]


class ComputeOutlook:
    """What steps take on devices, by the measurements that contexts have (`ContextAdvice.steps`)."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[StepTimes, StepSeconds]] = {}
        """By the identity of a table, which contexts of one model share; the table is kept so that it stays its own."""

    def cost(self, context: Context, device: Device) -> StepSeconds | None:
        """What the steps of a context's engine take on a device; None where nobody has measured that."""
        advice = context.advice.get(device.facts.kind)
        times = advice.steps if advice is not None else None
        if times is None or not times.prefill or not times.decode:
            return None
        known = self._seconds.get(id(times))
        if known is None or known[0] is not times:  # numbers of tables that a snapshot brought back are used again
            known = self._seconds[id(times)] = times, StepSeconds(times, factor=OVERESTIMATE / device.facts.speed)
        return known[1]

    def prefill_s(self, context: Context, device: Device, call: Call) -> float:
        """What it takes to read a call's prompt; 0 where nobody knows."""
        cost = self.cost(context, device)
        tokens = prompt_tokens(call)
        return cost.prefill_s(tokens, tokens / 2) if cost is not None else 0.0

    def decode_s(self, library: Library) -> float:
        """A decode step of a library with the calls that it holds; one that is loading will have one at least."""
        rows = len(library.held) or int(library.state is LibraryState.LOADING)
        cost = self.cost(library.context, library.devices[0]) if rows else None
        if cost is None:
            return 0.0
        tokens = sum(prompt_tokens(call) + output_tokens(call) / 2 for call in library.held.values())
        return cost.decode_s(rows, tokens / rows if library.held else 1.0)[0]

    def is_too_slow(self, device: Device, call: Call, *, left_s: float) -> bool:
        """True if a device cannot read a call's prompt within `left_s`, even if it does nothing else."""
        return _wants_soon(call) and self.prefill_s(call.group.context, device, call) > left_s

    def is_too_full(self, device: Device, call: Call, *, left_s: float, leaving: frozenset[int]) -> bool:
        """True if a new instance on a device would not serve a call in time beside the others there, for all that is
        known. `left_s`: seconds until its first token is due; `leaving`: libraries that end for it."""
        context, tpot_s = call.group.context, call.group.options.objective.tpot_s
        cost = self.cost(context, device)
        if cost is None:
            return False
        others_s = [self.decode_s(library) for library in staying(device) if library.id not in leaving]
        if _wants_soon(call) and self.prefill_s(context, device, call) + max(others_s, default=0.0) > left_s:
            return True
        if left_s == math.inf and not any(others_s):  # it was evicted, and waits for no one here
            return False
        return 0 < tpot_s < sum(others_s) + cost.decode_s(1, prompt_tokens(call))[0]


def _wants_soon(call: Call) -> bool:
    return call.group.options.objective.first_token_s(prompt_tokens(call)) > 0


def first_token_left_s(view: View, call: Call) -> float:
    """Seconds until the first token of a waiting call is due; its load is granted on top (§IX-A).

    A call that is to be evicted would have its whole time again. One that was evicted has no limit: it may have had its
    first token, and it must find a place, however late it is and however slow the devices are that are left.
    """
    wanted_s = call.group.options.objective.first_token_s(prompt_tokens(call))
    if call.state is not CallState.WAITING:
        return wanted_s
    return math.inf if call.id in view.reports else call.submitted_at + wanted_s - view.now
