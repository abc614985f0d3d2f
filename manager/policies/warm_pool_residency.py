"""Residency, as PromptTuner's (§4.4.2): every 50 ms, which devices are warmed for which jobs, and which are let go.

A walk through all lines (Algorithm 2) says which jobs need more replicas than their pools will have in time. These are
loaded on *cold* devices: devices with room that hold nothing. (Several models may share a device under the default
policy; here each job should run at the speed that was predicted for it.) What was ordered for a job is its own until it
starts; what is lost of it (a load that failed, a pilot that is gone) is ordered again while that can still help, else
its job is looked at anew. Which pilots are no good for a context is told as by default.

A replica that nobody has used for `window_s` is unloaded, unless a job waits in its pool: then it waits for more of
them. On a batch cluster this makes a device cold; whether its pilot stays is provisioning's business.

Beyond the paper:

- Jobs that are late are left what is idle anyway. Where their context has no replicas they get the fewest that they can
  run on; those without deadlines get more by the default rules, once no job with a deadline waits.
- Idle libraries of contexts that rounds do not decide about make room at once, as they do for anybody.
- Who has lacked replicas to run on at all is first in line for devices, the longest first. After `patience_s` it may
  also have what is idle in pools that lack nothing for so long, and share a device where none is cold; a context with
  no replica at all gets one from whoever holds most, as by default. Without an order two gangs would each keep what the
  other waits for.
- `early` lets idle replicas go at once for jobs of other models that miss their deadlines. The paper does not.

`reuse = False` (an ablation): a library serves one call and is unloaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from stoker.manager.core.fitness import unfit
from stoker.manager.core.forecasts import is_in_time, is_news
from stoker.manager.core.nouns import Context, Device, Library
from stoker.manager.core.phases import LibraryState, PilotState
from stoker.manager.core.seams import Action, Changes, Drop, FailWaiting, Forecast, Load, Timer, Unload, View
from stoker.manager.policies.residency import LoadWhereWanted
from stoker.manager.policies.warm_pool_book import Book, Ordered, Place, in_rounds
from stoker.manager.policies.warm_pool_books import Books
from stoker.manager.policies.warm_pool_lines import Job
from stoker.manager.policies.warm_pool_rounds import LOOK_AGAIN_S, ROUND_S
from stoker.manager.policies.warm_pool_shelf import Replica, Shelf, cold_devices, makes_warm
from stoker.manager.policies.warm_pools import Fate, Walk
from stoker.manager.protocol.ids import CallId, LibraryId, RecipeKey
from stoker.units import show_seconds

WINDOW_S = 60.0
"""§6.3."""

LOOKS = 128
"""So many jobs are looked at in a round; of more the rest in the next ones."""


class WarmPools(LoadWhereWanted):
    """Residency: Algorithm 2 for contexts with jobs in line, the default way for all others."""

    period_s = ROUND_S

    def __init__(
        self,
        books: Books,
        *,
        window_s: float = WINDOW_S,
        delay: bool = True,
        reuse: bool = True,
        early: bool = False,
        looks: int = LOOKS,
        **default: Any,
    ) -> None:
        super().__init__(**default)
        self.books = books
        self.window_s = window_s
        self.reuse = reuse
        self.early = early
        self.looks = looks
        self._walk = Walk(delay=delay)
        self._again_at = math.inf
        self._reclaim_at = math.inf
        self._cold: list[Device] | None = None
        """Cold devices, as long as libraries and pilots stay as they are."""
        self._first: dict[str, Job] = {}
        """Of each pool, the first job that this walk has found without help."""

    # ---- asked as things happen

    def wanted(self, view: View, context: Context) -> Sequence[Action]:
        """Nothing, where a round decides, but room that others must make, or a word that it can never be."""
        book, head = self.books.of(context), context.queue.head()
        hopeless = self.hopeless_gangs(view, context)
        if hopeless:
            return (*hopeless, Timer(view.now + self.ask_again_s, context.recipe.key))
        if book is None or not book.active:
            if head is None or not in_rounds(head):
                return super().wanted(view, context)
            return (Timer(view.now + self.ask_again_s, context.recipe.key),)  # the next round has it in its books
        book.walk_due = True
        plan: list[Action] = [Timer(view.now + self.ask_again_s, context.recipe.key)]
        alive = any(self._counts(view, library) for library in context.libraries.values())
        if Shelf(view, cold_devices(view), fits=self._fits).look(context.recipe.key, most=1) or (
            alive and context.lacking is None
        ):
            return plan
        if not alive and not book.promises:
            impossible = self._impossible(view, context) or self._unfit_everywhere(view, context)
            if impossible is not None:
                return (FailWaiting(RecipeKey(context.recipe.key), impossible),)
        return plan + (self._evict_idle(view, context) or self._share(view, context))

    def round(self, view: View, changes: Changes) -> Sequence[Action]:
        """What is warmed, and what is let go."""
        self.books.take(view, changes)
        if changes.libraries or changes.pilots:
            self._cold = None
        plan: list[Action] = []
        due = any(book.walk_due for book in self.books.all.values())
        if self._walk.under_way or due or view.now >= self._again_at:
            shelf = self._shelf(view)
            if not self._walk.under_way:
                plan += self._begin(view, shelf)
            if self._walk.under_way:
                plan += self._go_on(view, shelf)
        if due or view.now >= self._reclaim_at:
            plan += self._reclaim(view)
        return plan

    def rests(self, view: View) -> bool:  # noqa: ARG002
        """While nothing waits, runs or may be let go."""
        return (
            min(self._again_at, self._reclaim_at) == math.inf
            and not self._walk.under_way
            and not any(book.active or book.walk_due for book in self.books.all.values())
        )

    # ---- the walk

    def _begin(self, view: View, shelf: Shelf) -> list[Action]:
        plan: list[Action] = []
        pools, looks = {}, False
        self._first = {}
        for key, book in self.books.all.items():
            book.walk_due = book.short = False
            plan += self._order_again(view, book, shelf)
            pool = book.pool(now=view.now, idle=len(book.free(reuse=self.reuse)))
            running = [(call, ends_at) for call, ends_at in book.running() if in_rounds(call)]
            for call, ends_at in running:
                plan += _forecast(view, call.id, ends_at, call.group.options.objective.deadline_at)
            if book.active:
                pools[key] = pool
            looks |= book.active or bool(running)
        self._again_at = view.now + LOOK_AGAIN_S if looks else math.inf
        if pools:
            self._walk.begin(pools, now=view.now)
        return plan

    def _go_on(self, view: View, shelf: Shelf) -> list[Action]:
        plan: list[Action] = []
        lines = {key: book.line for key, book in self.books.all.items()}
        for fate in self._walk.go_on(lines, shelf, looks=self.looks):
            book = self.books.all[fate.model]
            if fate.promise is not None:
                loads, places = self._load(book.context, shelf.taken.pop(fate.job.id))
                book.promises[fate.job.id] = Ordered(fate.promise, places)
                book.allot_due = True
                plan += loads
            elif not fate.helped:
                self._first.setdefault(fate.model, fate.job)
                book.short = book.short or book.line.is_hopeful(fate.job.id)
            plan += self._tell(view, book, fate)
        return plan if self._walk.under_way else plan + self._without_help(view, shelf)

    def _load(self, context: Context, sets: list[Replica]) -> tuple[list[Action], list[Place]]:
        key = RecipeKey(context.recipe.key)
        places = [(devices[0].pilot.id, tuple(device.id for device in devices)) for devices in sets]
        return [
            Load(key, pilot, ids, self.reservation(context, devices))
            for (pilot, ids), devices in zip(places, sets, strict=True)
        ], places

    def _order_again(self, view: View, book: Book, shelf: Shelf) -> list[Action]:
        """What will never come of a promise is ordered once more, if that still helps; else there is no promise."""
        plan: list[Action] = []
        for id, ordered in tuple(book.promises.items()):
            missing, promise = len(ordered.lost), ordered.promise
            if not missing:
                continue
            key, job = book.context.recipe.key, book.line.jobs[id]
            free_at = view.now + book.load_s + job.run_s[promise.replicas + promise.beside - 1]
            if free_at > job.deadline_at or shelf.count(key, most=missing) < missing:
                del book.promises[id]
                book.allot_due = True
                continue
            shelf.take(key, missing, job=id)
            loads, places = self._load(book.context, shelf.taken.pop(id))
            left = [place for place in ordered.places if place not in ordered.lost]
            book.promises[id] = Ordered(msgspec.structs.replace(promise, free_at=free_at), left + places)
            plan += loads
        return plan

    # ---- those who must see what becomes of them

    def _without_help(self, view: View, shelf: Shelf) -> list[Action]:
        """Pools whose first job without help lacks replicas: there are to be as many as it can run on. Who has lacked
        them longest gets what is cold, and what others can spare, before all others get any: two gangs that wait for
        each other's devices would wait for ever."""
        for key, book in self.books.all.items():
            if book.lacks[1] not in book.line.jobs:
                job = self._first.get(key)
                too_few = job is not None and self._alive(view, book, most=job.least) < job.least
                book.lacks = (view.now, job.id) if job is not None and too_few else (math.inf, 0)
        plan: list[Action] = []
        for lacks, id, key in sorted((self.books.all[key].lacks, job.id, key) for key, job in self._first.items()):
            book = self.books.all[key]
            job = book.line.jobs.get(id)
            if job is None:  # it has left since it was looked at
                continue
            wants, alive = self._wants(view, book, job), self._alive(view, book, most=job.least)
            found = shelf.pick(key, wants)
            found += self._beside_others(view, book, wants - len(found), shelf)
            plan += self._load(book.context, found)[0]
            if book.short or len(found) < wants:
                plan += self._evict_for(view, book)
            if book.short and self.early:
                plan += self._reclaim_early(view, book, job, shelf)
            if lacks[1] and alive + len(found) < job.least:
                break
        return plan

    def _wants(self, view: View, book: Book, job: Job) -> int:
        """Replicas to warm beside those that walks have ordered."""
        context, line = book.context, book.line
        if not context.load_failures and (line.late or line.hopeful):
            return max(0, job.least - self._alive(view, book, most=job.least))
        alive = [library for library in context.libraries.values() if self._counts(view, library)]
        if context.load_failures:
            return 0 if any(library.state is LibraryState.LOADING for library in alive) else 1
        return self.worth_loading(context, alive)

    def _alive(self, view: View, book: Book, *, most: int) -> int:
        """Replicas that are hot or on their way; not counted further than `most`."""
        alive = (
            library
            for library in book.context.libraries.values()
            if self._counts(view, library)
            and (library.pilot.state is PilotState.HERE or self.books.may_return(library.pilot, view.now))
        )
        return sum(1 for _ in islice(alive, most))

    def _beside_others(self, view: View, book: Book, count: int, shelf: Shelf) -> list[Replica]:
        """Devices with room that hold something: for who has lacked replicas for long."""
        if count <= 0 or view.now - book.lacks[0] < self.patience_s:
            return []
        places = self.open_places(view, book.context, desperate=True)
        found = list(islice((devices for devices in places if not shelf.has_given(devices)), count))
        shelf.give(found)
        return found

    def _evict_for(self, view: View, book: Book) -> list[Action]:
        """Devices of which all that they hold is idle and may leave become cold, those that were used longest ago: for
        one replica at a time, as by default."""
        context, lacks_since = book.context, book.lacks[0]
        others = any(self.books.of(other) is None and other.idle for other in view.contexts.values())
        if not others and view.now - lacks_since < self.patience_s:
            return []
        best: tuple[float, list[Library]] | None = None
        for pilot in view.pilots.values():
            if pilot.state is not PilotState.HERE or unfit(pilot, context.recipe.key, view.now):
                continue
            ways = [way for device in pilot.devices.values() if (way := self._cleared(view, context, device))]
            ways = sorted(ways, key=lambda way: way[0])[: context.recipe.needs.devices]
            if len(ways) == context.recipe.needs.devices and (best is None or ways[-1][0] < best[0]):
                best = ways[-1][0], [library for _, libraries in ways for library in libraries]
        chosen = {library.id: None for library in best[1]} if best is not None else {}
        return [Unload(id, f"idle, and room is needed for {context.recipe.name}") for id in chosen]

    def _cleared(self, view: View, context: Context, device: Device) -> tuple[float, list[Library]] | None:
        """Libraries that leave so that a device is cold, and when the last of them was used; None if one may not."""
        if not self._suits(context, device) or self.minimum(context, device) > device.facts.memory_bytes:
            return None
        there = [x for x in device.libraries.values() if makes_warm(x) and x.state is not LibraryState.STOPPING]
        if not all(_idle(library) and self._may_leave(view, library, context) for library in there):
            return None
        return max((library.used_at for library in there), default=-math.inf), there

    # ---- words

    def _tell(self, view: View, book: Book, fate: Fate) -> list[Action]:
        """What is expected of a job; or that it is dropped, where nothing but that can be."""
        job = fate.job
        if not fate.helped and job.deadline_at:
            begins_at = view.now if book.context.libraries else view.now + book.load_s
            call = view.calls.get(CallId(job.id)) if job.is_lost(begins_at) else None
            if call is not None and call.group.options.objective.drop_late:
                return [Drop(call.id, _too_late(view, fate))]
        return [] if job.id in book.others else _forecast(view, job.id, fate.ends_at, job.deadline_at)

    # ---- letting go

    def _reclaim(self, view: View) -> list[Action]:
        plan: list[Action] = []
        self._reclaim_at = math.inf
        for book in self.books.all.values():
            free = {library.id: library for library in book.free()}
            since = book.idle_since = {id: book.idle_since.get(id, view.now) for id in free}
            if not self.reuse:
                used = [id for id, library in free.items() if library.served]
                plan += [Unload(id, "it has served a call") for id in used]
                since = {id: at for id, at in since.items() if id not in used}
            if book.line:  # who waits beside idle replicas waits for more of them
                continue
            for id, at in since.items():
                if at + self.window_s <= view.now:
                    plan.append(Unload(id, f"nobody has used it for {self.window_s:g} s"))
                else:
                    self._reclaim_at = min(self._reclaim_at, at + self.window_s)
        return plan

    def _reclaim_early(self, view: View, book: Book, job: Job, shelf: Shelf) -> list[Action]:
        """Idle replicas of other models, that nobody there waits for, make room for a job that is late otherwise."""
        context = book.context
        wants = job.fewest(begins_at=view.now + book.load_s, most=len(job.run_s))
        wants -= shelf.count(context.recipe.key, most=wants) + shelf.coming(context)
        found: list[tuple[float, LibraryId]] = []
        for other in self.books.all.values():
            if other is not book and not other.line.hopeful:
                since = sorted((at, id) for id, at in other.idle_since.items() if self._could_hold(view, context, id))
                found += since[: max(0, len(other.idle_since) - other.kept)]
        reason = f"idle, and a job of {context.recipe.name} would be late"
        return [Unload(id, reason) for _, id in sorted(found)[: max(0, wants)]]

    def _could_hold(self, view: View, context: Context, id: LibraryId) -> bool:
        """Whether a context would fit on the devices of a library, were they cold."""
        library = view.libraries.get(id)
        return library is not None and all(
            self._suits(context, device) and self.minimum(context, device) <= device.facts.memory_bytes
            for device in library.devices
        )

    def _shelf(self, view: View) -> Shelf:
        if self._cold is None:
            self._cold = cold_devices(view)
        return Shelf(view, self._cold, fits=self._fits)

    def _make_room(self, view: View, context: Context, **how: Any) -> list[Library]:
        may_go = how.pop("may_go")

        def may_leave(library: Library) -> bool:
            return may_go(library) and self._may_leave(view, library, context)

        return super()._make_room(view, context, may_go=may_leave, **how)

    def _may_leave(self, view: View, library: Library, context: Context) -> bool:
        """Whether a library may make room for a context. What is in a pool leaves after its window, but for calls that
        go the default way, and for who has lacked replicas long, and longer than those who wait there."""
        other, asks = self.books.of(library.context), self.books.of(context)
        if other is None:
            return True
        if not library.held and (other.line.hopeful or len(other.free()) <= other.kept):
            return False
        if asks is None or not asks.active:
            return True
        return asks.lacks < other.lacks and view.now - asks.lacks[0] >= self.patience_s


def _idle(library: Library) -> bool:
    return library.state is LibraryState.READY and not library.held and not library.zombies


def _forecast(view: View, id: int, ends_at: float, due_at: float) -> list[Action]:
    """What is expected of a call, if that is known and has changed by more than it can be known to."""
    if ends_at == math.inf:
        return []
    ends_at = max(ends_at, view.now)
    in_time = is_in_time(ends_at, due_at=due_at, now=view.now)
    news = is_news(view.forecasts.get(id), ends_at, in_time=in_time, now=view.now)
    return [Forecast(CallId(id), ends_at, in_time)] if news else []


def _too_late(view: View, fate: Fate) -> str:
    left_s = fate.job.deadline_at - view.now
    if left_s <= 0:
        return f"dropped: {show_seconds(-left_s)} past its deadline"
    due = f"dropped: its deadline is in {show_seconds(left_s)}"
    if fate.ends_at == math.inf:
        return f"{due}, and it has not begun"
    soonest = show_seconds(fate.ends_at - view.now)
    return f"{due}, and it cannot be done sooner than in {soonest}: give it more time, or let it be late"
