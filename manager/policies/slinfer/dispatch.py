"""SLINFER at the dispatch and residency seams (§V to §VIII).

A call is offered to one ready instance after the other: CPUs first, large batches before small ones. The manager
checks memory; the pilot judges whether the call and its neighbours would be in time, and may refuse
(`stoker.pilot.core.turns`). When all refuse, neighbours with smaller batches make room (§VIII-A), or a new
instance is loaded. Otherwise the call is tried again in rounds, and dropped once its first token would be late
(§IX-B).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.seams import (
    Action,
    Ask,
    Changes,
    Drop,
    Evict,
    FailCall,
    FailWaiting,
    Provisioning,
    Send,
    Unload,
    View,
)
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.keep_alive import IdleTimers
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.manager.policies.slinfer.placement import (
    CacheSizes,
    InstancePlaces,
    cold_start_s,
    first_token_s,
    instances,
    loading,
    shares_by_token,
    staying,
)
from stoker.manager.policies.where_to_load import is_probed
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import LibraryId, RecipeKey

_ROUND_S = 0.1  # Seconds between two rounds

_MOST_TRIED = 32  # Waiting calls of a context that are tried in one round

_PER_LOAD = 4  # Waiting calls per loading instance above which another one is loaded


_NO_GANGS = "the policy slinfer runs a call of a language model in one library; leave its gang away"


class OfferByHeadroom(HottestFirst):
    """Dispatch: offers, preemption, drops, keep-alive. `consolidates`: preempt neighbours with smaller batches."""

    period_s = _ROUND_S
    honours = HottestFirst.honours | {"ttft_s", "tpot_s", "expected_output"}
    asks_every_call = True

    def __init__(
        self, sizes: CacheSizes, placement: InstancePlaces, *, keep_alive_s: float, consolidates: bool, drops: bool
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self._idle = IdleTimers(keep_alive_s)
        self._placement = placement
        self._consolidates = consolidates
        self._drops = drops
        self._offered: dict[int, LibraryId] = {}  # The library that each call was offered last
        self._refused: dict[int, set[LibraryId]] = {}  # Libraries that refused a call since its last new try
        self._asked: set[str] = set()  # Contexts whose step times were requested

    def window(self, view: View, library: Library) -> int:
        return library.slots if shares_by_token(library.context) else super().window(view, library)

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        context = call.group.context
        if not shares_by_token(context):
            return super().place(view, call)
        if call.group.options.gang[1] > 1:
            return FailCall(call.id, Failure(FailureKind.NO_DEVICE, _NO_GANGS))
        if context.recipe.key not in self._asked:
            self._asked.add(context.recipe.key)
            return (Ask(RecipeKey(context.recipe.key)),)  # the answer comes at once, or the next round places the call
        last = self._offered.pop(call.id, None)
        if last is None:
            return self._plan(view, call)
        refused = self._refused.setdefault(call.id, set())
        library = view.libraries.get(last)
        if library is not None and last not in refused and library.admits(call):  # once only: it may refuse again
            refused.add(last)
            grows = self._sizes.grow(library, library.required_bytes) if library.required_bytes else None
            if grows:
                return self._offer(call, library, grows)
        refused.add(last)
        return self._plan(view, call)

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        return self._offers(library) if shares_by_token(library.context) else super().pull(view, library)

    def dry(self, view: View, library: Library) -> Iterable[Action]:
        """Unload an idle instance after a while: loads are fast, and it occupies a device (§IX-I4)."""
        return self._idle.idle(view, library) if shares_by_token(library.context) else super().dry(view, library)

    def timer(self, view: View, key: str) -> Iterable[Action]:
        return self._idle.fired(view, key)

    def advised(self, view: View, context: Context) -> Iterable[Action]:
        return self._again(view, context) if shares_by_token(context) else ()

    def round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        for notes in (self._offered, self._refused):
            for id in [id for id in notes if id not in view.calls]:
                del notes[id]
        for context in tuple(view.hungry.values()):
            if shares_by_token(context):
                yield from self._again(view, context)

    def rests(self, view: View) -> bool:
        return not any(map(shares_by_token, view.hungry.values()))

    def _again(self, view: View, context: Context) -> Iterator[Action]:
        for call in context.queue.first(_MOST_TRIED, looks=_MOST_TRIED):
            self._offered.pop(call.id, None)
            self._refused.pop(call.id, None)
            if self._drops and (late_s := _late_s(view, call)) > 0:
                yield Drop(call.id, f"its first token would come more than {late_s:.2f} s late")
            else:
                yield from self._plan(view, call)

    def _offers(self, library: Library) -> Iterator[Action]:
        for call in library.context.queue.first(_MOST_TRIED, looks=_MOST_TRIED):
            if library.load >= library.slots:
                return
            if library.admits(call) and library.id not in self._refused.get(call.id, ()):
                grows = self._sizes.admit(library, call)
                if grows is None:
                    return
                yield self._offer(call, library, grows)

    def _offer(self, call: Call, library: Library, reserve_bytes: int) -> Send:
        self._offered[call.id] = library.id
        return Send(call.id, library.id, offer=True, reserve_bytes=reserve_bytes)

    # ---- one call

    def _plan(self, view: View, call: Call) -> Iterator[Action]:
        """Yield what to do for a call now; nothing if it has to wait."""
        context, refused = call.group.context, self._refused.get(call.id, ())
        hindered: list[Library] = []
        for library in instances(context):
            if library.id in refused or library.load >= library.slots or not library.admits(call):
                continue
            grows = self._sizes.admit(library, call)
            if grows is None:
                hindered.append(library)
                continue
            yield self._offer(call, library, grows)
            return
        if self._consolidates:
            for library in sorted(hindered, key=lambda library: -len(library.held)):
                plan = self._preempt(view, library, call)
                if plan:
                    yield from plan
                    yield self._offer(call, library, self._sizes.admit(library, call) or 0)
                    return
        on_their_way = len(loading(context))
        if not on_their_way or (not is_probed(context) and context.queue.count > _PER_LOAD * on_their_way):
            yield from self._placement.new_instance(view, call)

    def _preempt(self, view: View, library: Library, call: Call) -> list[Action]:
        """Return the eviction of neighbours with smaller batches, smallest first, if all their calls fit elsewhere
        (§VIII-A).
        """
        lacks, size = self._sizes.lacks(library, call), len(library.held)
        neighbours = [x for x in staying(library.devices[0]) if x is not library and x.usable and len(x.held) < size]
        plan: list[Action] = []
        for victim in sorted(neighbours, key=lambda x: (len(x.held), -x.promised_bytes)):
            if lacks <= 0:
                break
            if victim.held and not self._placement.fits_elsewhere(view, victim.held.values(), but=victim):
                continue
            plan += [Evict(held.id) for held in victim.held.values()]
            plan.append(Unload(victim.id, f"{library.context.recipe.name} grows beside it"))
            lacks -= victim.promised_bytes
        return plan if lacks <= 0 else []


def _late_s(view: View, call: Call) -> float:
    """Return how late the first token of a waiting call would be at least, without its load (§IX-A); negative if
    evicted.
    """
    wanted_s = first_token_s(call)
    if not wanted_s or call.id in view.reports:
        return -1.0
    return view.now - call.submitted_at - wanted_s - cold_start_s(view, call)


class ShrinkLate(LoadWhereWanted):
    """Residency: instances that are far too large shrink (§VII-B). Dispatch loads and unloads them."""

    period_s = _ROUND_S
    honours = frozenset()  # No limits: dispatch loads and unloads instances by its own rule

    def __init__(self, sizes: CacheSizes, *, resizes: bool, provisioning: Provisioning | None = None) -> None:
        super().__init__(provisioning=provisioning)
        self._sizes = sizes
        self._resizes = resizes

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """Fail calls of a model that can be loaded nowhere; dispatch loads the others."""
        if not shares_by_token(context):
            return super().wanted(view, context)
        nowhere = None if loading(context) or instances(context) else self.why_nowhere(view, context)
        return (FailWaiting(RecipeKey(context.recipe.key), nowhere),) if nowhere is not None else ()

    def measured(self, view: View, library: Library) -> int:
        return library.promised_bytes if shares_by_token(library.context) else super().measured(view, library)

    def round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        for library in tuple(view.libraries.values()) if self._resizes else ():
            if library.usable and shares_by_token(library.context):
                yield from self._sizes.shrink(library)

    def rests(self, view: View) -> bool:
        return not any(shares_by_token(library.context) for library in view.libraries.values())
