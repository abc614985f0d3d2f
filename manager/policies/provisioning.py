"""Choose how many blocks to request from which source.

The opportunistic rule keeps a few blocks pending, up to a maximum. The demand rule requests enough blocks to finish the
waiting calls in a given time. The fixed rule keeps a constant number. The rule `once` requests its blocks once.

Beyond the first and minimum blocks of the site file, a block is requested only if a queued call could use it. If blocks
of the first suitable source wait longer than `late_s`, the next source is used too. A failing source is tried again
after a pause, which doubles each time. After `give_up` failures (twice as many if the source has started pilots)
waiting calls fail. A block that nothing uses for `idle_s` seconds is released. A pending block that no call needs for
`SURPLUS_CANCEL_S` seconds is cancelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from stoker.manager.core.deadlines import has_source_time_for_load
from stoker.manager.core.nouns import Context, LibraryState
from stoker.manager.core.seams import Action, FailWaiting, ReleaseBlock, Timer, View, WantBlocks
from stoker.manager.core.state import Block, SourceState
from stoker.manager.policies.base import Quiet
from stoker.manager.policies.keep_alive import can_spare_libraries_of, is_needed_for_minimum, new_pilot_library_quota
from stoker.manager.policies.where_to_load import count_fitting_libraries
from stoker.protocol.blocks import BlockPhase, ProvisioningRule
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import RecipeKey

SURPLUS_CANCEL_S = 20.0  # Seconds after which pending blocks that no call needs are cancelled
_SURPLUS_CHECK_S = 5.0  # Seconds between two checks for pending blocks that no call needs
_NOT_REPLACED = "its blocks have ended, and no block replaces them"
UNKNOWN_RUN_S = 30.0


class ExternalPilots(Quiet):
    """Provisioning for pilots that another program starts. `elastic`: pilots of other kinds may join later."""

    def __init__(self, *, elastic: bool = False) -> None:
        self.elastic = elastic

    def demand(self, view: View) -> Sequence[Action]:  # noqa: ARG002
        return ()

    def may_bring(self, view: View, context: Context) -> bool:  # noqa: ARG002
        return self.elastic


class KeepBlocks(Quiet):
    """The default provisioning policy."""

    def __init__(
        self,
        *, backoff_s: float = 2.0, longest_backoff_s: float = 600.0, longest_short_s: float = 60.0,
        late_s: float = 30.0, give_up: int = 3,
    ) -> None:  # fmt: skip
        self.backoff_s = backoff_s
        self.longest_backoff_s = longest_backoff_s
        self.longest_short_s = longest_short_s
        self.late_s = late_s
        self.give_up = give_up
        self._surplus: dict[str, tuple[float, int]] = {}
        """By source: time at which a surplus of pending blocks began, and smallest surplus since then."""
        self._useful_sources: set[str] = set()  # Sources whose devices suited a waiting call at least once

    def demand(self, view: View) -> Sequence[Action]:
        if not view.sources:
            return ()
        plan: list[Action] = []
        rooms = {context: new_pilot_library_quota(view, context) for context in view.waiting_contexts.values()}
        waiting = {context: _needed_slots(context, room) for context, room in rooms.items() if room != 0}
        gone: Counter[Context] = Counter()
        for source in view.sources.values():
            useful = {context: calls for context, calls in waiting.items() if self._could_load(source, context)}
            wanted = self._blocks_to_request(view, source, useful)
            if wanted > 0:
                plan.append(WantBlocks(source.source.name, wanted))
            plan += self._release_idle_blocks(view, source, has_use=bool(useful), gone=gone)
            plan += self._cancel_surplus(view, source, useful)
            filling = [
                at
                for id in source.filling_blocks
                if (at := source.blocks[id].first_pilot_joined_at + self.late_s) >= view.now
            ]
            if filling and useful:
                plan.append(Timer(min(filling) + 0.1, f"filling/{source.source.name}"))
            if len(view.sources) > 1:
                coming = [source.blocks[id] for id in source.coming_blocks]
                queued = [block.phase_since for block in coming if block.phase is not BlockPhase.RUNNING]
                soon = [since for since in queued if view.now - since <= self.late_s]
                if soon:
                    plan.append(Timer(min(soon) + self.late_s + 0.1, f"late/{source.source.name}"))
                # A running block never counts as late, even if it boots slowly.
                in_time = len(coming) - len(queued) + len(soon)
                joining = self._slots_of_joining_pilots(view, source, useful)
                slots = (wanted + in_time) * _slots_per_block(source, useful) + joining
                for context in useful:  # request no blocks of the next source for calls that fit in these slots
                    taken = min(waiting[context], slots)
                    waiting[context] -= taken
                    slots -= taken
        return [*plan, *self._fail_waiting_calls(view)]

    def on_timer(self, view: View, key: str) -> Sequence[Action]:  # noqa: ARG002
        return self.demand(view)

    def may_bring(self, view: View, context: Context) -> bool:
        """Return True if pilots of a source could load the context, or if a source has not started any pilot yet."""
        return any(self._could_load(source, context) for source in view.sources.values())

    def _blocks_to_request(self, view: View, source: SourceState, useful: dict[Context, int]) -> int:
        if source.stop_reason or view.now < self._retry_at(source):
            return 0
        rule = source.source
        if rule.rule is ProvisioningRule.ONCE:
            return min(rule.first, source.requestable_blocks) if self._is_first_request_due(source) else 0
        staying, coming = len(source.staying_blocks), len(source.coming_blocks)
        room = source.requestable_blocks
        least = max(rule.least, rule.first if not source.devices or rule.rule is ProvisioningRule.FIXED else 0)
        asked_for = max(0, least - staying)
        if rule.rule is ProvisioningRule.FIXED or not useful:
            return min(asked_for, room)
        calls = max(0, sum(useful.values()) - self._slots_of_joining_pilots(view, source, useful))
        worth = -(-calls // _slots_per_block(source, useful)) - coming
        if rule.rule is ProvisioningRule.OPPORTUNISTIC:
            wanted = min(rule.keep_pending - coming, worth)
        else:
            seconds = sum(calls * (context.run_s or UNKNOWN_RUN_S) for context, calls in useful.items())
            in_time = -int(-seconds // (rule.finish_within_s * _slots_per_block(source, useful)))
            wanted = min(in_time - staying, worth)
        return max(0, min(room, max(asked_for, wanted)))

    def _is_first_request_due(self, source: SourceState) -> bool:
        return not (source.blocks or source.failures or source.devices)

    def _slots_of_joining_pilots(self, view: View, source: SourceState, useful: Iterable[Context]) -> int:
        blocks = (source.blocks[id] for id in source.filling_blocks)
        recent = (block for block in blocks if view.now - block.first_pilot_joined_at <= self.late_s)
        missing = sum(source.source.nodes - block.joined_pilots for block in recent)
        return missing * _slots_per_block(source, useful) // source.source.nodes

    def _could_load(self, source: SourceState, context: Context) -> bool:
        needs = context.recipe.needs
        if source.stop_reason or not has_source_time_for_load(context, source.source):
            return False
        if not source.devices:
            return not source.source.kind or not needs.kinds or source.source.kind in needs.kinds
        return count_fitting_libraries(context, source.devices) > 0

    def _retry_at(self, source: SourceState) -> float:
        times = source.failures + max(0, source.short_lived_count - 1)
        if not times:
            return 0.0
        longest_s = self.longest_backoff_s if source.failures else self.longest_short_s
        pause_s: float = self.backoff_s * 2.0 ** min(times - 1, 20)
        return source.failed_at + min(longest_s, pause_s)

    def _release_idle_blocks(
        self, view: View, source: SourceState, *, has_use: bool, gone: Counter[Context]
    ) -> Iterator[Action]:
        rule = source.source
        retry_at = self._retry_at(source)
        if retry_at > view.now:
            yield Timer(retry_at, f"retry/{rule.name}")
        spare = len(source.staying_blocks) - self._least_blocks(source)
        if rule.rule is ProvisioningRule.FIXED or spare <= 0:
            return
        if has_use:
            yield Timer(view.now + rule.idle_s, f"idle/{rule.name}")
            return
        staying = [source.blocks[id] for id in source.staying_blocks]
        idle = [(self._idle_since(view, block), block) for block in staying]
        over = [block for since, block in idle if since is not None and view.now - since >= rule.idle_s]
        over.sort(key=lambda block: (bool(block.pilots), _promised_bytes(view, block), block.phase_since))
        may_go = (block for block in over if can_spare_libraries_of((view.pilots[id] for id in block.pilots), gone))
        for block in islice(may_go, spare):
            yield ReleaseBlock(block.id, f"nothing to do for {rule.idle_s:g} s")
        soon = [since + rule.idle_s for since, block in idle if since is not None and block not in over]
        yield Timer(max(min(soon, default=view.now + rule.idle_s), view.now + 0.1), f"idle/{rule.name}")

    def _cancel_surplus(self, view: View, source: SourceState, useful: dict[Context, int]) -> Iterator[Action]:
        rule = source.source
        if useful:
            self._useful_sources.add(rule.name)
        coming = [source.blocks[id] for id in source.coming_blocks]
        queued = [block for block in coming if block.phase is not BlockPhase.RUNNING]
        spare = min(len(queued), len(source.staying_blocks) - self._least_blocks(source))
        before = self._surplus.pop(rule.name, None)
        if rule.rule is ProvisioningRule.FIXED or spare <= 0 or rule.name not in self._useful_sources:
            return
        calls = max(0, sum(useful.values()) - self._slots_of_joining_pilots(view, source, useful))
        needed = -(-calls // _slots_per_block(source, useful)) - (len(coming) - len(queued))
        surplus = min(spare, len(queued) - max(0, needed))
        if surplus > 0:
            since, least = before or (view.now, surplus)
            least = min(least, surplus)
            if view.now - since >= SURPLUS_CANCEL_S:
                for block in sorted(queued, key=lambda block: block.phase_since)[-least:]:
                    yield ReleaseBlock(block.id, f"it is queued, and no call has needed it for {SURPLUS_CANCEL_S:g} s")
            else:
                self._surplus[rule.name] = since, least
        yield Timer(view.now + _SURPLUS_CHECK_S, f"surplus/{rule.name}")

    def _least_blocks(self, source: SourceState) -> int:
        rule = source.source
        return rule.first if rule.rule is ProvisioningRule.FIXED else rule.least

    def _idle_since(self, view: View, block: Block) -> float | None:
        """Return when a block became idle; None while the block runs calls, loads a context, or must stay."""
        since = block.phase_since
        for id in block.pilots:
            pilot = view.pilots[id]
            since = max(since, pilot.used_at)
            for library in pilot.libraries.values():
                is_loading = library.state is LibraryState.LOADING
                if library.held or library.withdrawn_calls or is_loading or is_needed_for_minimum(library):
                    return None
                since = max(since, library.used_at)
        return since

    def _can_still_start_pilots(self, source: SourceState) -> bool:
        if source.coming_blocks or source.source.rule is ProvisioningRule.ONCE:
            return bool(source.coming_blocks) or self._is_first_request_due(source)
        # A source that has started pilots has a correct site file; its jobs may be killed from outside.
        give_up = 2 * self.give_up if source.devices else self.give_up
        return not source.stop_reason and source.failures < give_up

    def _fail_waiting_calls(self, view: View) -> Iterator[Action]:
        """Fail waiting calls if every source keeps failing and no pilot is connected."""
        able = (device for pilot in view.pilots.values() for device in pilot.devices.values() if not device.fault)
        if not view.sources or not view.waiting_contexts or any(True for _ in able):
            return
        sources = view.sources.values()
        if any(self._can_still_start_pilots(source) for source in sources):
            return
        why = ((source.source.name, source.stop_reason or source.last_failure or _NOT_REPLACED) for source in sources)
        said = [f"no pilot could be started: {name}: {what}" for name, what in why]
        more = "\n  ".join([*said, "fix the cause (in the site file, or on the node of the job) and try again"])
        for key in view.waiting_contexts:
            yield FailWaiting(RecipeKey(key), Failure(FailureKind.NO_DEVICE, more))


def _needed_slots(context: Context, room: int | None) -> int:
    """Return how many slots waiting calls still need. `room`: maximum number of libraries that new pilots may load."""
    head = context.queue.head()
    if head is None:
        return 0
    options = head.group.options
    members = options.gang[1] if options.objective.deadline_at else options.gang[0]
    coming = context.slots * sum(x.state is LibraryState.LOADING for x in context.libraries.values())
    free = len(context.idle) if members > 1 else 0
    lacking = max(0, context.queue.count * members - coming - free)
    return lacking if room is None else min(lacking, room * context.slots)


def _slots_per_block(source: SourceState, contexts: Iterable[Context]) -> int:
    """Return how many calls of these contexts a block runs at a time. Spare cores count if all contexts name CPUs."""
    kinds = [context.recipe.needs.kinds for context in contexts]
    on_cpus = bool(kinds) and all(names and all(name.partition(" ")[0] == "cpu" for name in names) for names in kinds)
    devices = sum(facts.on_host if on_cpus else not facts.spare for facts in source.devices)
    return max(1, source.source.nodes * (devices or source.source.slots or 1))


def _promised_bytes(view: View, block: Block) -> int:
    devices = (device for id in block.pilots for device in view.pilots[id].devices.values())
    return sum(device.promised_bytes for device in devices)
