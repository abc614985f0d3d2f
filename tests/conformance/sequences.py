"""Sequences of orders and faults, with the reactions required of every pilot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from conformance.shell import Loads, Shell

from stoker.contexts.recipe import Needs, ObjectRef
from stoker.pilot.core.memory import CLAIM_CHECK_INTERVAL_S
from stoker.protocol import to_manager as say
from stoker.protocol import to_pilot as order
from stoker.protocol.blocks import LossReason
from stoker.protocol.calls import FailureKind
from stoker.protocol.ids import LibraryId

AGENT, SIMULATED, POOL = "agent", "simulator", "taskvine"

_NO_LIMITS = "the simulator has no limits of time and memory"
_OWN_WATCH = "a TaskVine library watches its own calls and loads"
_OWN_FILES = "TaskVine fetches objects itself"
_NO_TIME = "the stand-in for TaskVine has no clock: due work runs at once"
_ONE_LIBRARY = "a slot of the stand-in for TaskVine holds one library"
_NO_EVICTION = "TaskVine evicts no call"
_NO_LOSS = "the simulator loses no frame"
_NO_SIGNAL = "a simulated batch system sends no signal"


class Sequence(msgspec.Struct, frozen=True):
    """A sequence of orders and checks. `without`: shells that cannot run the sequence, with reasons. `ends_pilot`: True
    if the sequence ends the pilot.
    """

    run: Callable[[Shell], None]
    without: Mapping[str, str] = {}
    ends_pilot: bool = False
    walltime_s: float = 0.0

    @property
    def name(self) -> str:
        return self.run.__name__


SEQUENCES: list[Sequence] = []


def sequence(
    *, ends_pilot: bool = False, walltime_s: float = 0.0, **without: str
) -> Callable[[Callable[[Shell], None]], Callable[[Shell], None]]:
    def add(run: Callable[[Shell], None]) -> Callable[[Shell], None]:
        SEQUENCES.append(Sequence(run, without, ends_pilot, walltime_s))
        return run

    return add


# ---- from order to end


@sequence()
def library_starts_runs_calls_and_ends(pilot: Shell) -> None:
    library, calls = pilot.ready(), pilot.new_calls(2)
    pilot.run(library, calls)
    pilot.end(library, calls)
    pilot.stop(library)
    gone = pilot.expect(say.LibraryGone, library=library)
    assert (gone.failure, gone.loading, gone.running, gone.unstarted) == (None, False, (), ())


@sequence()
def repeated_start_order_starts_one_library(pilot: Shell) -> None:
    recipe = pilot.recipe(Loads.AT_ONCE)
    library = pilot.start(recipe=recipe)
    pilot.start(recipe=recipe, again=library)
    pilot.expect(say.LibraryReady, library=library)
    pilot.silent(say.LibraryReady, library=library)
    pilot.stop(library)
    pilot.expect(say.LibraryGone, library=library)
    pilot.say(order.StartLibrary(library, recipe, (pilot.device(0)[0],)))
    pilot.silent(say.LibraryReady, library=library)
    assert pilot.hello().libraries == ()


@sequence()
def library_larger_than_the_device_is_refused(pilot: Shell) -> None:
    _, size = pilot.device(0)
    library = pilot.start(device_memory_bytes=size + 1)
    pilot.expect_failure(library, FailureKind.CONTEXT, loading=True)


@sequence()
def ended_library_frees_its_memory(pilot: Shell) -> None:
    _, size = pilot.device(0)
    first = pilot.ready(device_memory_bytes=size)
    pilot.stop(first)
    pilot.expect(say.LibraryGone, library=first)
    pilot.ready(device_memory_bytes=size)


@sequence()
def library_waits_for_the_end_of_the_one_it_replaces(pilot: Shell) -> None:
    _, size = pilot.device(0)
    first = pilot.ready(device_memory_bytes=size)
    calls = pilot.new_calls(1)
    pilot.begin(first, calls)
    pilot.stop(first)
    second = pilot.start(device_memory_bytes=size)
    pilot.silent(say.LibraryReady, library=second)
    pilot.end(first, calls)
    pilot.expect(say.LibraryGone, library=first)
    pilot.expect(say.LibraryReady, library=second)


@sequence(taskvine=_NO_TIME)
def load_without_room_is_refused_after_a_second(pilot: Shell) -> None:
    _, size = pilot.device(0)
    pilot.ready(device_memory_bytes=size)
    second = pilot.start(device_memory_bytes=size)
    pilot.silent(say.LibraryGone, library=second, due_in_s=CLAIM_CHECK_INTERVAL_S)
    pilot.wait(1.2)
    gone = pilot.expect_failure(second, FailureKind.PILOT, loading=True)
    assert "no library on the device will end or shrink" in gone.failure.message


@sequence()
def failing_loader_ends_its_library(pilot: Shell) -> None:
    library = pilot.start(Loads.FAILS)
    pilot.expect_failure(library, FailureKind.CONTEXT, loading=True)


@sequence(simulator=_NO_LIMITS, taskvine=_OWN_WATCH)
def load_that_exceeds_its_time_limit_is_ended(pilot: Shell) -> None:
    library = pilot.start(Loads.NEVER)
    pilot.wait(1.0)
    gone = pilot.expect_failure(library, FailureKind.CONTEXT, loading=True)
    assert "did not load within" in gone.failure.message


@sequence()
def stopped_load_ends_without_a_failure(pilot: Shell) -> None:
    library = pilot.start(Loads.WHEN_LET)
    pilot.stop(library)
    gone = pilot.expect(say.LibraryGone, library=library)
    assert (gone.failure, gone.loading) == (None, True)


# ---- objects


@sequence(taskvine=_OWN_FILES)
def library_waits_for_its_objects(pilot: Shell) -> None:
    recipe = pilot.recipe(Loads.FILES)
    (ref,) = recipe.objects
    library = pilot.start(recipe=recipe)
    pilot.expect(say.WantObjects, objects=(ref,))
    pilot.silent(say.LibraryReady, library=library)
    pilot.say(order.FetchObject(ref, origin=True))
    pilot.arrive(ref)
    (arrival,) = pilot.expect(say.ObjectsCached).arrivals
    assert (arrival.name, arrival.origin_bytes) == (ref.name, ref.size_bytes)
    pilot.expect(say.LibraryReady, library=library)
    pilot.hello()
    pilot.unread.clear()
    again = pilot.recipe(Loads.AT_ONCE)
    pilot.ready(recipe=msgspec.structs.replace(again, objects=(ref,)), device=1)
    pilot.silent(say.WantObjects, objects=(ref,))


@sequence(taskvine=_OWN_FILES)
def object_without_a_source_ends_the_load(pilot: Shell) -> None:
    recipe = pilot.recipe(Loads.FILES)
    (ref,) = recipe.objects
    library = pilot.start(recipe=recipe)
    pilot.expect(say.WantObjects, objects=(ref,))
    pilot.say(order.FetchObject(ref))
    gone = pilot.expect(say.LibraryGone, library=library)
    assert gone.failure is not None
    assert gone.loading
    assert ref.name in gone.failure.message


@sequence()
def wait_for_snapshots_is_limited(pilot: Shell) -> None:
    library = pilot.start(snapshots={"bf16": ObjectRef("snapshot", 1000)}, snapshot_wait_s=0.2)
    pilot.wait(0.3)
    pilot.expect(say.LibraryReady, library=library)


# ---- calls


@sequence()
def calls_of_a_loading_library_wait_and_can_be_returned(pilot: Shell) -> None:
    library = pilot.start(Loads.WHEN_LET)
    one, two, three, four = calls = pilot.new_calls(4)
    pilot.run(library, calls)
    pilot.say(order.TakeBack(library, 2))
    pilot.expect_returned(library, [four, three])
    pilot.say(order.CancelCalls(library, (one,)))
    pilot.expect_returned(library, [one])
    pilot.let_load(library)
    pilot.expect(say.LibraryReady, library=library)
    pilot.end(library, [two])


@sequence()
def waiting_calls_are_returned_newest_first(pilot: Shell) -> None:
    library = pilot.ready()
    one, two, three = calls = pilot.new_calls(3)
    pilot.begin(library, calls)
    pilot.say(order.TakeBack(library, 5))
    pilot.expect_returned(library, [three, two])
    pilot.end(library, [one])


@sequence()
def returned_call_can_be_sent_again(pilot: Shell) -> None:
    library = pilot.ready()
    _, two = calls = pilot.new_calls(2)
    pilot.begin(library, calls)
    pilot.say(order.CancelCalls(library, (two,)))
    pilot.expect_returned(library, [two])
    pilot.run(library, [two])
    pilot.end(library, calls)


@sequence()
def repeated_call_runs_once(pilot: Shell) -> None:
    library, calls = pilot.ready(), pilot.new_calls(1)
    pilot.run(library, calls)
    pilot.run(library, calls)
    pilot.owed[calls[0]] -= 1
    pilot.settle()
    pilot.end(library, calls)
    pilot.silent(say.CallsEnded)


@sequence()
def calls_that_have_ended_are_not_returned_when_they_are_cancelled(pilot: Shell) -> None:
    library, calls = pilot.ready(), pilot.new_calls(1)
    pilot.run(library, calls)
    pilot.end(library, calls)
    pilot.say(order.CancelCalls(library, tuple(calls), running=True))
    pilot.silent(say.CallsReturned)


@sequence()
def calls_for_an_unknown_library_are_refused(pilot: Shell) -> None:
    library, calls = pilot.new_library(), pilot.new_calls(2)
    pilot.run(library, calls[:1])
    assert "is not on this pilot" in pilot.expect(say.CallsReturned, library=library).refused
    pilot.say(order.TakeBack(library, 1))
    pilot.say(order.CancelCalls(library, (calls[1],)))
    pilot.silent(say.CallsReturned)
    pilot.say(order.StopLibrary(library, "enough"))
    assert pilot.expect(say.LibraryGone, library=library).failure is None


@sequence()
def draining_library_ends_its_call_and_takes_no_other(pilot: Shell) -> None:
    library = pilot.ready()
    one, two, three = pilot.new_calls(3)
    pilot.begin(library, [one, two])
    pilot.stop(library)
    pilot.expect_returned(library, [two])
    pilot.run(library, [three])
    assert "about to end" in pilot.expect_returned(library, [three]).refused
    pilot.end(library, [one])
    assert pilot.expect(say.LibraryGone, library=library).failure is None


@sequence()
def killed_library_lists_running_and_waiting_calls(pilot: Shell) -> None:
    library = pilot.ready()
    one, two = calls = pilot.new_calls(2)
    pilot.begin(library, calls)
    pilot.stop(library, drain=False)
    gone = pilot.expect(say.LibraryGone, library=library)
    assert (gone.failure, gone.running, gone.unstarted) == (None, (one,), (two,))


@sequence()
def dead_process_lists_running_and_waiting_calls(pilot: Shell) -> None:
    library = pilot.ready()
    one, two = calls = pilot.new_calls(2)
    pilot.begin(library, calls)
    pilot.die(library)
    gone = pilot.expect_failure(library, FailureKind.DIED)
    assert (gone.running, gone.unstarted) == ((one,), (two,))


@sequence(simulator=_NO_LIMITS, taskvine=_OWN_WATCH)
def call_is_stopped_alone_or_with_its_library(pilot: Shell) -> None:
    library = pilot.ready()
    one, two, deaf, unbegun = pilot.new_calls(4)
    pilot.say_together(*pilot.orders(library, [one], limit_s=0.5), *pilot.orders(library, [two]))
    pilot.begins(one)
    pilot.wait(1.0)
    (end,) = pilot.expect(say.CallsEnded, library=library).ends
    assert end.failure is not None
    assert (end.call, end.failure.kind) == (one, FailureKind.TIMEOUT)
    pilot.end(library, [two])
    pilot.silent(say.LibraryGone)
    pilot.ignores_stops(library, deaf)
    pilot.begin(library, [deaf, unbegun])
    pilot.say(order.CancelCalls(library, (deaf,), running=True))
    pilot.expect_returned(library, [unbegun])
    gone = pilot.expect(say.LibraryGone, library=library)
    assert gone.failure is not None
    assert (gone.failure.kind, gone.running) == (FailureKind.CANCELLED, (deaf,))


@sequence(taskvine="the stand-in for TaskVine cannot stop a call")
def cancelled_running_call_leaves_its_library_running(pilot: Shell) -> None:
    library, (one, two) = pilot.ready(), pilot.new_calls(2)
    pilot.begin(library, [one, two])
    pilot.say(order.CancelCalls(library, (one,), running=True))
    assert pilot.expect(say.CallEvicted, library=library).progress.call == one
    pilot.end(library, [two])
    pilot.silent(say.LibraryGone)


@sequence(taskvine=_NO_EVICTION)
def evicted_call_that_returns_is_not_cancelled(pilot: Shell) -> None:
    library, (call,) = pilot.ready(), pilot.new_calls(1)
    pilot.begin(library, [call])
    pilot.say(order.CancelCalls(library, (call,), running=True, grace_s=1.0))
    pilot.expect(say.CallEvicted, library=library)
    pilot.run(library, [call])
    pilot.wait(1.3)
    pilot.end(library, [call])
    pilot.silent(say.LibraryGone)


@sequence(taskvine=_NO_EVICTION)
def running_call_is_evicted_with_its_progress(pilot: Shell) -> None:
    library, (call,) = pilot.ready(), pilot.new_calls(1)
    pilot.begin(library, [call])
    pilot.say(order.EvictCall(library, call))
    assert pilot.expect(say.CallEvicted, library=library).progress.call == call


@sequence()
def reservation_grows_and_shrinks(pilot: Shell) -> None:
    _, size = pilot.device(0)
    library = pilot.ready(device_memory_bytes=size // 2)
    for wanted in (size, size // 4):
        pilot.say(order.ResizeLibrary(library, wanted))
        assert pilot.expect(say.LibraryResized, library=library).device_memory_bytes == wanted
    assert [facts.reserved_bytes for facts in pilot.hello().libraries] == [size // 4]


def _declared(pilot: Shell, memory_bytes: int) -> LibraryId:
    recipe = msgspec.structs.replace(pilot.recipe(Loads.AT_ONCE), needs=Needs(memory_bytes=memory_bytes))
    return pilot.ready(recipe=recipe, device_memory_bytes=memory_bytes)


@sequence(taskvine=_ONE_LIBRARY)
def growth_waits_for_a_shrink(pilot: Shell) -> None:
    _, size = pilot.device(0)
    first, second = _declared(pilot, size // 2), _declared(pilot, size // 4)
    pilot.say_together(order.ResizeLibrary(second, size // 4 * 3), order.ResizeLibrary(first, size // 4))
    resized = [pilot.expect(say.LibraryResized) for _ in range(2)]
    assert [(each.library, each.device_memory_bytes) for each in resized] == [
        (first, size // 4), (second, size // 4 * 3),
    ]  # fmt: skip


@sequence(taskvine=_NO_TIME)
def growth_without_room_is_refused_after_a_second(pilot: Shell) -> None:
    _, size = pilot.device(0)
    _, second = _declared(pilot, size // 2), _declared(pilot, size // 4)
    pilot.say(order.ResizeLibrary(second, size))
    pilot.silent(say.LibraryResized, library=second, due_in_s=CLAIM_CHECK_INTERVAL_S)
    pilot.wait(1.2)
    resized = pilot.expect(say.LibraryResized, library=second)
    assert (resized.device_memory_bytes, resized.ordered_bytes) == (size // 4, size)


# ---- the connection


@sequence(simulator=_NO_LOSS)
def hello_describes_the_state_before_unacknowledged_frames(pilot: Shell) -> None:
    first, second = pilot.ready(), pilot.ready(device=1)
    one, two, three = pilot.new_calls(3)
    pilot.run(first, [one, two])
    pilot.begin(second, [three])
    pilot.keep_acks()
    pilot.end(first, [one])
    pilot.die(second)
    pilot.expect(say.LibraryGone, library=second)
    hello = pilot.hello(welcome=False)
    assert pilot.held(hello, first) == (one, two), "the manager has not acknowledged the first call's end"
    assert pilot.held(hello, second) == (three,)


@sequence()
def orders_sent_before_the_last_hello_are_ignored(pilot: Shell) -> None:
    library, (call,) = pilot.ready(), pilot.new_calls(1)
    hello = pilot.hello(welcome=False)
    pilot.run(library, [call])
    other = pilot.start(device=1)
    after = pilot.hello()
    assert after.number == hello.number + 1
    assert pilot.held(after, library) == ()
    assert [facts.library for facts in after.libraries] == [library]
    pilot.open.discard(other)
    pilot.owed[call] -= 1
    pilot.run(library, [call])
    pilot.end(library, [call])


@sequence()
def hello_lists_calls_in_order(pilot: Shell) -> None:
    library, calls = pilot.ready(), pilot.new_calls(3)
    pilot.run(library, calls)
    hello = pilot.hello()
    assert pilot.held(hello, library) == tuple(calls)
    assert hello.last_library >= library
    pilot.end(library, calls)


# ---- the pilot's end


@sequence(ends_pilot=True)
def draining_pilot_finishes_running_calls_and_leaves(pilot: Shell) -> None:
    library = pilot.ready()
    one, two, three = pilot.new_calls(3)
    pilot.begin(library, [one, two])
    pilot.say(order.Exit("bye", drain=True))
    pilot.expect_returned(library, [two])
    pilot.run(library, [three])
    pilot.expect_returned(library, [three])
    pilot.silent(say.PilotLeaving)
    pilot.end(library, [one])
    assert pilot.expect(say.LibraryGone, library=library).failure is None
    assert pilot.exit_code() == 0
    assert pilot.expect(say.PilotLeaving).loss is None


@sequence(ends_pilot=True)
def pilot_ordered_to_exit_leaves_at_once(pilot: Shell) -> None:
    library, calls = pilot.ready(), pilot.new_calls(1)
    pilot.begin(library, calls)
    pilot.say(order.Exit("bye"))
    assert pilot.expect(say.LibraryGone, library=library).running == tuple(calls)
    assert pilot.exit_code() == 0
    pilot.expect(say.PilotLeaving)


@sequence(ends_pilot=True, simulator=_NO_SIGNAL)
def signalled_pilot_reports_why_it_leaves(pilot: Shell) -> None:
    library, calls = pilot.ready(), pilot.new_calls(1)
    pilot.begin(library, calls)
    pilot.signal()
    pilot.end(library, calls)
    assert pilot.expect(say.LibraryGone, library=library).failure is None
    assert pilot.exit_code() == 0
    assert pilot.expect(say.PilotLeaving).loss is LossReason.SIGNALLED


@sequence(
    ends_pilot=True,
    walltime_s=2.5,
    simulator="the simulated batch system ends a pilot at its walltime",
    taskvine="workers of TaskVine have the walltime",
)
def pilot_drains_before_its_walltime_ends(pilot: Shell) -> None:
    pilot.wait(2.5)
    assert pilot.exit_code() == 0
    pilot.expect(say.PilotLeaving)
