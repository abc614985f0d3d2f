"""SLINFER's dispatch and residency policies (§V to §VIII).

A call is offered to ready instances one after another: CPUs first, then the largest batches (§VIII-B). The manager
checks memory. The pilot may refuse if the call or its neighbours would be late (`stoker.pilot.core.turns`). If all
instances refuse, neighbours with smaller batches make room (§VIII-A). The offer names them, and they stop if the pilot
accepts the offer. Otherwise the call waits for a loading instance that will be in time, or the policy wakes or loads an
instance (§V). A call without an instance is tried again in rounds, and dropped once its first token would be late
(§IX-B).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from stoker.manager.core import seams
from stoker.manager.core.nouns import Call, CallState, Context, Library, LibraryState
from stoker.manager.core.seams import Action, Changes, Provisioning, Send, View
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.keep_alive import IdleTimers
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.manager.policies.slinfer import placement
from stoker.manager.policies.slinfer.placement import CacheSizes, InstancePlacement, has_known_token_memory
from stoker.manager.policies.slinfer.validation import (
    longest_cold_start_s,
    seconds_until_first_token_due,
    ttft_objective_s,
)
from stoker.manager.policies.where_to_load import has_failed_loads
from stoker.pilot.core.memory import declared_bytes, is_limited_to_one_process
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import LibraryId, RecipeKey

_ROUND_S = 0.1

_MOST_RETRIED_CALLS = 32  # Maximum calls of a context per round, oldest first; to place a call takes about 0.3 ms

_MOST_EXAMINED_INSTANCES = 200  # Maximum instances that are examined to estimate when a dropped call may be resubmitted

_LEAST_RETRY_S = 0.5

_NO_GANGS = "the policy slinfer runs a call of a language model in one library; leave gang out"


class _Refusal(NamedTuple):
    """Why an instance refused a call: too little memory (`required_bytes`), or decode steps that take `over_s` seconds
    too long. Both are 0 for other reasons.
    """

    required_bytes: int = 0
    over_s: float = 0.0


class OfferByHeadroom(HottestFirst):
    """SLINFER's dispatch policy. `consolidates`: offer calls to large batches first, and preempt small ones (§VIII)."""

    period_s = _ROUND_S
    honours = HottestFirst.honours | {"ttft_s", "tpot_s", "expected_output"}
    asks_every_call = True

    def __init__(
        self, sizes: CacheSizes, placement: InstancePlacement, *, keep_alive_s: float, consolidates: bool, drops: bool
    ) -> None:
        super().__init__()
        self._sizes = sizes
        self._idle_timers = IdleTimers(keep_alive_s, sleeps=True)
        self._placement = placement
        self._consolidates = consolidates
        self._drops = drops
        self._offered: dict[int, Send] = {}
        self._refused: dict[int, dict[LibraryId, _Refusal]] = {}  # By call: refusals since the call was last planned
        self._refusal_reasons: dict[int, str] = {}  # By call: reason of the last refusal
        self._expected: dict[LibraryId, dict[int, Call]] = {}  # Waiting calls that each loading instance will serve
        self._advice_requested: set[str] = set()  # Contexts for which the policy has requested step times

    def window(self, view: View, library: Library) -> int:
        return library.slots if has_known_token_memory(library.context) else super().window(view, library)

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        context = call.group.context
        if not has_known_token_memory(context):
            return super().place(view, call)
        if call.group.options.gang[1] > 1:
            return seams.FailCall(call.id, Failure(FailureKind.NO_DEVICE, _NO_GANGS))
        if context.recipe.key not in self._advice_requested:
            self._advice_requested.add(context.recipe.key)
            return (seams.Ask(RecipeKey(context.recipe.key)),)  # place the call when the answer comes
        last = self._offered.pop(call.id, None)
        if last is None:
            return self._plan(view, call)
        refused = self._refused.setdefault(call.id, {})
        library, again = view.libraries.get(last.library), last.library in refused or bool(last.preempts)
        refused[last.library] = _Refusal()
        if library is not None:
            self._refusal_reasons[call.id] = library.refusal
        if library is not None and not again and library.admits(call):  # offer the call once more, with more memory
            refused[last.library] = _Refusal(library.required_bytes, library.over_s)
            grows = self._sizes.bytes_to_grow(library, library.required_bytes) if library.required_bytes else None
            if grows:
                return self._offer(call, library, grows)
        return self._plan(view, call)

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        return (
            self._offer_waiting_calls(view, library)
            if has_known_token_memory(library.context)
            else super().pull(view, library)
        )

    def on_out_of_calls(self, view: View, library: Library) -> Iterable[Action]:
        """Stop an idle instance soon, or put it to sleep, to free its device, because loads are fast (§IX-I4)."""
        if not has_known_token_memory(library.context):
            return super().on_out_of_calls(view, library)
        if library.context.limits.keep_alive_s is not None:  # the residency policy unloads the library after this time
            return ()
        return self._idle_timers.handle_idle_library(view, library)

    def on_timer(self, view: View, key: str) -> Iterable[Action]:
        if key in view.contexts:
            return super().on_timer(view, key)
        return self._idle_timers.handle_timer(view, key)

    def on_advice(self, view: View, context: Context) -> Iterable[Action]:
        return self._retry_waiting_calls(view, context) if has_known_token_memory(context) else ()

    def on_round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        self._offered = {id: send for id, send in self._offered.items() if id in view.calls}
        self._refused = {id: refused for id, refused in self._refused.items() if id in view.calls}
        self._refusal_reasons = {id: why for id, why in self._refusal_reasons.items() if id in view.calls}
        loads = {id for id, x in view.libraries.items() if x.state is LibraryState.LOADING}
        self._expected = {id: calls for id, calls in self._expected.items() if id in loads}
        for context in tuple(view.waiting_contexts.values()):
            if has_known_token_memory(context):
                yield from self._retry_waiting_calls(view, context)

    def may_skip_rounds(self, view: View) -> bool:
        return not any(map(has_known_token_memory, view.waiting_contexts.values()))

    def _retry_waiting_calls(self, view: View, context: Context) -> Iterator[Action]:
        for call in context.queue.first_calls(_MOST_RETRIED_CALLS, max_examined=_MOST_RETRIED_CALLS):
            self._offered.pop(call.id, None)
            self._refused.pop(call.id, None)
            if self._drops and (late_s := _first_token_lateness_s(view, call)) > 0:
                why = f"its first token would be more than {late_s:.2f} s late"
                if last := self._refusal_reasons.get(call.id):
                    why += f"; no library accepted the call: {last}"
                yield seams.Drop(call.id, why, retry_after_s=_seconds_until_request_ends(view, call))
            else:
                yield from self._plan(view, call)

    def _offer_waiting_calls(self, view: View, library: Library) -> Iterator[Action]:
        for call in library.context.queue.first_calls(_MOST_RETRIED_CALLS, max_examined=_MOST_RETRIED_CALLS):
            if library.load >= library.slots:
                return
            free = library.admits(call) and library.id not in self._refused.get(call.id, ())
            if free and not self._waits_for_loading_instance(view, call, library):
                grows = self._sizes.admit(library, call)
                if grows is None:
                    return
                yield self._offer(call, library, grows)

    def _offer(self, call: Call, library: Library, reserve_bytes: int, *preempted: Library) -> Send:
        ids = tuple(each.id for each in preempted)
        send = Send(call.id, library.id, offer=True, reserve_bytes=reserve_bytes, preempts=ids)
        self._offered[call.id] = send
        return send

    def _plan(self, view: View, call: Call) -> Iterator[Action]:
        context, refused = call.group.context, self._refused.get(call.id, {})
        hindered: list[tuple[Library, _Refusal]] = []
        for library in placement.list_ready_instances(context, largest_first=self._consolidates):
            if (
                library.load >= library.slots
                or not library.admits(call)
                or self._waits_for_loading_instance(view, call, library)
            ):
                continue
            if library.id in refused:
                hindered.append((library, refused[library.id]))
                continue
            grows = self._sizes.admit(library, call)
            if grows is None:
                if not placement.find_token_cache(context, library.devices[0]).is_fixed:
                    hindered.append((library, _Refusal(self._sizes.bytes_with_another_call(library, call))))
                continue
            yield self._offer(call, library, grows)
            return
        if self._consolidates:
            for library, refusal in sorted(hindered, key=lambda each: -len(each[0].held)):
                send = self._preempt(view, library, call, refusal)
                if send is not None:
                    yield send
                    return
        if not self._waits_for_load(view, call):
            known = {library.id for library in placement.list_loading_instances(context)}
            yield from self._placement.start_instance_for_call(view, call)
            for library in placement.list_loading_instances(context):
                if library.id not in known:
                    self._expected[library.id] = {call.id: call}

    def _preempt(self, view: View, library: Library, call: Call, refusal: _Refusal) -> Send | None:
        """Offer a call to an instance after preempting neighbours that take its memory or decode time (§VIII-A)."""
        required = refusal.required_bytes
        lacks = required - library.promised_bytes - library.devices[0].budget_bytes if required else 0
        if lacks <= 0 and refusal.over_s <= 0:
            return None
        victims = self._placement.choose_neighbours_to_stop(view, library, lacks_bytes=lacks, over_s=refusal.over_s)
        if not victims:
            return None
        if not required:
            required = self._sizes.bytes_with_another_call(library, call)
        reserve_bytes = self._sizes.bytes_to_reserve_after_stops(library, required, victims)
        return self._offer(call, library, reserve_bytes, *victims)

    def _waits_for_loading_instance(self, view: View, call: Call, library: Library) -> bool:
        """Return True if a call would miss its first token here, but a loading instance will serve it (§IX-A)."""
        load_s = library.ready_at - library.started_at if call.submitted_at < library.ready_at else 0.0
        if seconds_until_first_token_due(view, call) + load_s >= 0:
            return False
        return any(
            call.id in self._expected.get(library.id, ())
            for library in placement.list_loading_instances(call.group.context)
        )

    def _waits_for_load(self, view: View, call: Call) -> bool:
        """Return True if a loading instance will serve a call in time after the calls that already wait for it."""
        context = call.group.context
        on_their_way = placement.list_loading_instances(context)
        if on_their_way and has_failed_loads(context):
            return True
        expected = [self._expected.setdefault(library.id, {}) for library in on_their_way]
        if any(call.id in calls for calls in expected):
            return True
        for library, calls in zip(on_their_way, expected, strict=True):
            waiting = [each for each in calls.values() if each.state is CallState.WAITING]
            if self._placement.can_serve_with_waiting_calls(view, library, waiting, call):
                calls[call.id] = call
                return True
        return False


def _seconds_until_request_ends(view: View, call: Call) -> float:
    """Return the seconds until a running request of the context ends; of any context if this one has no instance."""
    wanted_s = ttft_objective_s(call)
    known = (x for x in view.libraries.values() if has_known_token_memory(x.context))
    others = placement.list_ready_instances(call.group.context) or islice(known, _MOST_EXAMINED_INSTANCES)
    left_s = [
        held.sent_at + (library.context.run_s or wanted_s) - view.now
        for library in others
        for held in library.held.values()
    ]
    return max(_LEAST_RETRY_S, min(left_s, default=wanted_s))


def _first_token_lateness_s(view: View, call: Call) -> float:
    """Return how many seconds a call's first token is late, without load time (§IX-A); -1 if it has no deadline."""
    wanted_s = ttft_objective_s(call)
    if not wanted_s or call.id in view.reports:
        return -1.0
    return view.now - call.submitted_at - wanted_s - longest_cold_start_s(view, call)


class DelayedResize(LoadWhereWanted):
    """Shrinks instances that are far too large (§VII-B), and grows those that need more than estimated (§VII-D)."""

    period_s = _ROUND_S

    def __init__(
        self,
        sizes: CacheSizes,
        placement: InstancePlacement,
        *,
        resizes: bool,
        provisioning: Provisioning | None = None,
    ) -> None:
        super().__init__(provisioning=provisioning)
        self._sizes = sizes
        self._placement = placement
        self._resizes = resizes
        self._handled_reports: dict[LibraryId, float] = {}  # Time of the last handled report of a too small cache

    def on_waiting_calls(self, view: View, context: Context) -> Sequence[Action]:
        if not has_known_token_memory(context):
            return super().on_waiting_calls(view, context)
        is_somewhere = any(x.is_usable or x.state is LibraryState.ASLEEP for x in context.libraries.values())
        nowhere = None if is_somewhere else self.why_nowhere(view, context)
        return (seams.FailWaiting(RecipeKey(context.recipe.key), nowhere),) if nowhere is not None else ()

    def reservation_after_load(self, view: View, library: Library) -> int:
        """Return the promised bytes, or the weights' bytes if no size is declared. The first offer adds a cache."""
        context, device = library.context, library.devices[0]
        if not has_known_token_memory(context) or placement.find_token_cache(context, device).is_fixed:
            return super().reservation_after_load(view, library)
        if declared_bytes(context.recipe.needs, device.facts) or is_limited_to_one_process(device.facts):
            return library.promised_bytes
        return min(library.promised_bytes, placement.find_token_cache(context, device).weights_bytes)

    def on_round(self, view: View, changes: Changes) -> Iterable[Action]:  # noqa: ARG002
        for id in [id for id in self._handled_reports if id not in view.libraries]:
            del self._handled_reports[id]
        for library in tuple(view.libraries.values()) if self._resizes else ():
            if library.is_usable and has_known_token_memory(library.context):
                yield from self._grow_or_evict(view, library) or self._sizes.shrink_if_far_too_large(library)
        for context in view.contexts.values():
            is_kept = context.limits.least and has_known_token_memory(context)
            # After a failed load, do not load the minimum again, because only waiting calls may cause a retry.
            if is_kept and not placement.list_loading_instances(context) and context.last_failure is None:
                yield from self._placement.start_minimum_instance(view, context)

    def _grow_or_evict(self, view: View, library: Library) -> tuple[Action, ...]:
        """Grow an instance whose cache will be too small, or else evict a waiting call that can run elsewhere."""
        batch, at = library.batch, library.batch_at
        if (
            batch is None
            or not batch.is_cache_too_small
            or library.unanswered_resizes
            or self._handled_reports.get(library.id) == at
        ):
            return ()
        self._handled_reports[library.id] = at
        grows = self._sizes.bytes_to_grow(library, self._sizes.reported_peak_bytes(library))
        if grows is not None:
            return (seams.Resize(library.id, grows),) if grows else ()
        call = self._placement.find_call_to_evict(view, library) if batch.waiting else None
        return (seams.Evict(call.id),) if call is not None else ()

    def may_skip_rounds(self, view: View) -> bool:
        contexts = {library.context: None for library in view.libraries.values()}
        kept = (context for context in view.contexts.values() if context.limits.least)
        return not any(has_known_token_memory(context) for some in (contexts, kept) for context in some)
