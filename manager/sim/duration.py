"""How long a call takes in the simulator, and how far it is after a part of that.

A call has a head (what its context takes for each call, and `fixed_s` of its own), work before its items that members
share (`shared_s`), and items. On a gang of n libraries the head takes as long as on one, the members must meet first,
what is shared takes an n-th of the time, and so do the items, nearly:

    T(n) = head + gang [n > 1] + shared / n + items * item / S(n),    S(n) = n * e ^ log2 n

where e is the share of a linear speedup that is kept with each doubling (`ContextModel.gang_efficiency`). Prompt tuning
scales so: gradients of a few kilobytes are exchanged after each iteration (PromptTuner, §2.2). All members take as long
as the slowest of them.

What is done when a call is checkpointed is its head, in part, and items; it goes on from there on a gang of any size,
or on another kind of device. To meet takes its time again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from stoker.manager.sim.world import ContextModel
from stoker.protocol.calls import CallSpec


def speedup(size: int, *, efficiency: float) -> float:
    """How many times faster the items of a call are done on a gang of so many."""
    return size * efficiency ** math.log2(size) if size > 1 else 1.0


def best_speedup(gang: tuple[int, int], *, efficiency: float) -> float:
    """The most that a gang between two sizes can have: one that loses over half with each doubling is best small."""
    return max(speedup(size, efficiency=efficiency) for size in gang)


class WorkDone(NamedTuple):
    """What of a call is done: the share of its head, and items."""

    head: float = 0.0
    items: float = 0.0

    def written(self) -> bytes:
        """As the state in a progress report."""
        return f"{self.head!r} {self.items!r}".encode()


NOTHING = WorkDone()


def done_of(spec: CallSpec) -> WorkDone:
    """What was done before a call came here."""
    return WorkDone(*map(float, spec.progress.split())) if spec.progress else NOTHING


class RunCourse(msgspec.Struct, frozen=True, gc=False):
    """How a run of a call goes: what was done `before`, `first_s` until its next item is begun (of which `meet_s` until
    the members have met), and `whole_s` until all `items` are done. Seconds at the full speed of its devices."""

    before: WorkDone
    items: int
    meet_s: float
    first_s: float
    whole_s: float

    def after(self, seconds: float) -> WorkDone:
        """What is done so many seconds after its beginning."""
        if seconds < self.first_s:
            head = max(0.0, seconds - self.meet_s) / (self.first_s - self.meet_s) if self.first_s > self.meet_s else 1.0
            return WorkDone(self.before.head + (1.0 - self.before.head) * head, self.before.items)
        items_s = self.whole_s - self.first_s
        share = min(1.0, (seconds - self.first_s) / items_s) if items_s else 1.0
        return WorkDone(1.0, self.before.items + (self.items - self.before.items) * share)


def course(
    model: ContextModel, spec: CallSpec, *, call_s: float, item_s: float, items: int, factor: float, size: int = 1
) -> RunCourse:
    """How a run on a gang of so many libraries goes. `call_s` and `item_s`: of the slowest member's device; `items`:
    those that it really has; `factor`: how much longer than the mean this call takes."""
    before = done_of(spec)
    before_s = spec.features.before_items_s(size) if spec.features is not None else 0.0
    meet_s = float(model.gang_s) if size > 1 else 0.0
    first_s = meet_s + (1.0 - before.head) * (factor * call_s + before_s)
    left = max(0.0, items - before.items)
    items_s = factor * left * item_s / speedup(size, efficiency=model.gang_efficiency)
    return RunCourse(before, items, meet_s, first_s, first_s + items_s)


def least_s(model: ContextModel, call_s: float, items_s: float, *, gang: tuple[int, int]) -> float:
    """The least that a call takes on a gang of the best size, if its parts take so long on one library."""
    together_s = model.gang_s + items_s / best_speedup(gang, efficiency=model.gang_efficiency)
    return call_s + (together_s if gang[0] > 1 else min(items_s, together_s))
