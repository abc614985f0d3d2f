"""Test the cores of a manager and of its pilots with late, repeated and lost frames between these cores.

Frames and orders are in transit until a rule delivers them. A broken connection loses all messages in transit. A
pilot that reconnects sends a hello and then all unacknowledged frames. Invariants: the client gets each result once;
no call runs in two libraries unless one of the pilots was declared lost; no device exceeds its memory; no library
ends twice. At the end both sides agree, the manager has refused only messages that may be late, and every call
ended.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import msgspec
from core.builders import recipe
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from properties.together import GB, Together, Wired

from stoker.contexts.recipe import ObjectRef
from stoker.manager.sim.validate import check_state
from stoker.pilot.core import memory
from stoker.protocol import to_manager as say
from stoker.protocol.ids import PilotId
from stoker.protocol.to_pilot import StopLibrary

WEIGHTS = ObjectRef("weights", GB, "/data/weights")
CONTEXTS = {
    "small": recipe("small", memory="3 GB", device_memory_bytes=3 * GB),
    "large": msgspec.structs.replace(recipe("large", memory="7 GB", device_memory_bytes=7 * GB), objects=(WEIGHTS,)),
    "read": msgspec.structs.replace(recipe("read", memory="2 GB", device_memory_bytes=2 * GB), objects=(WEIGHTS,)),
    "once": recipe("once", memory="1 GB", device_memory_bytes=GB, calls_per_library=1),
}
LATE = frozenset({
    # the frame was repeated, or was sent before the hello that follows a broken connection
    "repeated or early frame of a pilot",
    "frame of an unknown pilot",  # the pilot was declared lost
    "frame of a pilot before the hello that the manager requested",
    # the manager repeated the order after a hello, and the pilot answered twice
    "resize that the manager did not order",
})  # fmt: skip
"""Messages that may be refused, because they are late or repeated."""

names = st.sampled_from(("p0", "p1", "p2"))
places = st.integers(0, 3)
contexts = st.sampled_from(("small", "large", "small", "once", "read"))


class Cores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Together()
        self.cluster.define(*CONTEXTS.values())
        self.count = 0

    @initialize()
    def pilots(self) -> None:
        for name in ("p0", "p1"):
            self.cluster.wired[name] = Wired(name, self.cluster)
        self.submit("small", 6)
        self.submit("once", 1)
        self.quiet()
        self.submit("small", 3)
        self.cluster.all_arrives()

    def pilot(self, name: str) -> Wired:
        wired = self.cluster.wired
        return wired.get(name) or wired[min(wired)]

    # ---- the client
    @rule(context=contexts, count=st.integers(1, 4))
    def submit(self, context: str, count: int) -> None:
        self.cluster.call(*(f"c{self.count + n}" for n in range(count)), context=context)
        self.count += count

    @rule(back=st.integers(1, 12), running=st.booleans())
    def cancel(self, back: int, running: bool) -> None:
        call = self.cluster.ids[f"c{max(0, self.count - back)}"]
        self.cluster.tell("ana", say.Cancel([call], running))

    # ---- the connections
    @rule(name=names, count=st.integers(1, 6))
    def frames_arrive(self, name: str, count: int) -> None:
        for _ in range(count):
            self.cluster.hear_next(self.pilot(name))

    @rule(name=names, count=st.integers(1, 6), lists_cache=st.booleans())
    def orders_arrive(self, name: str, count: int, lists_cache: bool) -> None:
        for _ in range(count):
            self.pilot(name).hear(lists_cache=lists_cache)

    @rule(name=names)
    def a_frame_comes_twice(self, name: str) -> None:
        self.cluster.hear_again(self.pilot(name))

    @rule()
    def all_arrives(self) -> None:
        """Deliver all messages. Disconnected pilots stay disconnected."""
        self.cluster.all_arrives()

    @rule(name=names)
    def cut(self, name: str) -> None:
        if self.pilot(name).is_connected:
            self.cluster.pilot_cut(self.pilot(name))

    @rule(name=names, context=st.sampled_from(("once", "small")), loses_orders=st.sampled_from((False, False, True)))
    def reconnect(self, name: str, context: str, loses_orders: bool) -> None:
        """Replace a connection without notice to the manager, so that earlier orders may arrive after the hello."""
        pilot = self.pilot(name)
        if pilot.is_connected and not pilot.is_over:
            self.submit(context, 3)
            pilot.up.clear()
            if loses_orders:
                pilot.down.clear()
            pilot.connect()

    @rule(name=names)
    def give_up(self, name: str) -> None:
        if self.pilot(name).name in self.cluster.core.state.pilots:
            self.cluster.give_up(self.pilot(name))

    @rule(name=names)
    def come_back(self, name: str) -> None:
        pilot = self.cluster.wired.get(name)
        if pilot is None:
            self.cluster.wired[name] = Wired(name, self.cluster)
        elif not pilot.is_connected and not pilot.is_over:
            pilot.connect()

    # ---- the processes
    @rule(name=names, ends=st.integers(0, 3))
    def works(self, name: str, ends: int) -> None:
        self.pilot(name).works(ends=ends)

    @rule(name=names, place=places, settles=st.booleans())
    def die(self, name: str, place: int, settles: bool) -> None:
        pilot = self.pilot(name)
        processes = list(pilot.processes.values())
        if processes:
            processes[place % len(processes)].die()
            if settles:
                pilot.settle()

    @rule(name=names, place=places)
    def cannot_move(self, name: str, place: int) -> None:
        """Let the context of a library raise at the next sleep or wake."""
        processes = list(self.pilot(name).processes.values())
        if processes:
            processes[place % len(processes)].cannot_move = True

    @rule(name=names, context=contexts, upto=st.integers(1, 6))
    def sleep_and_wake(self, name: str, context: str, upto: int) -> None:
        """Put idle libraries to sleep and let a call wake one library; stop after `upto` steps."""
        pilot = self.pilot(name)
        steps = (
            lambda: pilot.works(ends=9),
            self.cluster.all_arrives,
            lambda: self.wait(3.0),
            self.quiet,
            lambda: self.submit(context, 2),
            self.cluster.all_arrives,
        )
        for step in steps[:upto]:
            step()

    @precondition(lambda self: len(self.cluster.wired) == 3)
    @rule()
    def leave(self) -> None:
        if not self.pilot("p2").is_over:
            self.pilot("p2").signal()

    @rule(name=names, context=st.sampled_from(("read", "large")), lists_cache=st.booleans())
    def lose_cached_objects(self, name: str, context: str, lists_cache: bool) -> None:
        """Clear the cache of a pilot and end its libraries, so that the next library finds an empty cache."""
        pilot = self.pilot(name)
        pilot.cache.clear()
        for process in pilot.processes.values():
            process.die()
        pilot.settle()
        self.submit(context, 3)
        for _ in range(6):
            self.cluster.hear_next(pilot)
            pilot.hear(lists_cache=lists_cache)

    @rule(seconds=st.sampled_from((0.0, 1.0, 4.0)), crosses=st.booleans())
    def wait(self, seconds: float, crosses: bool = False) -> None:
        """Advance the time. `crosses`: libraries end while the order to end them is in transit."""
        self.cluster.wait(seconds)
        for pilot in self.cluster.wired.values():
            pilot.time_passes()
            if crosses:
                for order in pilot.down:
                    if isinstance(order, StopLibrary) and order.library in pilot.processes:
                        pilot.processes[order.library].die()
                pilot.settle()

    # ---- invariants
    @invariant()
    def all_is_well(self) -> None:
        """Check that both sides have consistent states, and that only messages that may be late were refused."""
        check_state(self.cluster.core.state)
        for pilot in self.cluster.wired.values():
            pilot.validate()
        for reason, count in self.cluster.refused.items():
            assert reason in LATE or count <= self.cluster.crossed[reason], f"refused {count} times: {reason}"

    def quiet(self) -> None:
        """Deliver all messages, reconnect pilots, and let processes carry out their orders."""
        for _ in range(2):
            for pilot in self.cluster.wired.values():
                if not pilot.is_connected and not pilot.is_over:
                    pilot.connect()
                pilot.settle()
            self.cluster.all_arrives()
            for pilot in self.cluster.wired.values():
                pilot.works(ends=0)
            self.cluster.all_arrives()

    def agree(self) -> None:
        """Check that both sides know the same libraries, calls and target sizes."""
        pilots = self.cluster.core.state.pilots
        for pilot in self.cluster.wired.values():
            if pilot.is_over:
                continue
            known, core = pilots[PilotId(pilot.name)].libraries, pilot.core.state
            assert {number: sorted(library.held_calls) for number, library in core.libraries.items()} == {
                number: sorted({*library.held, *library.withdrawn_calls}) for number, library in known.items()
            }
            reserved = {number: memory.planned_bytes(core, library) for number, library in core.libraries.items()}
            promised = {number: library.promised_bytes for number, library in known.items()}
            assert reserved == promised
            assert {number: core.host_memory.reserved_bytes(number) for number in core.libraries} == {
                number: library.host_bytes for number, library in known.items()
            }
            fetches = self.cluster.core.state.transfers.peers[PilotId(pilot.name)].fetches
            assert core.wants.keys() == fetches.keys(), "what a pilot waits for is planned"
            assert not pilot.outbox.unacknowledged_frames(), "all that was said is acknowledged"

    def each_library_ended_once(self) -> None:
        for library in self.cluster.core.state.gone_libraries.values():
            told = Counter(text.partition(":")[0] for _, text in library.notes)
            ends = told["ended"] + told["lost with its pilot"] - told["reconnected with its pilot"]
            assert ends == 1, library.notes

    def teardown(self) -> None:
        if not self.cluster.wired:
            return
        self.quiet()
        self.agree()
        for name in ("p0", "p1"):  # every example ends with old orders that arrive after a new hello
            self.reconnect(name, "once", loses_orders=False)
        self.quiet()
        self.agree()
        for rounds in range(40 + len(self.cluster.core.state.calls)):  # a library may end only one call per round
            if rounds and not self.cluster.core.state.calls:
                break
            for pilot in self.cluster.wired.values():
                pilot.works(ends=20)
            self.cluster.all_arrives()
            self.wait(3.0, crosses=True)  # some libraries end before their order to end arrives
            self.quiet()
            self.all_is_well()
        left = [self.cluster.names[call] for call in self.cluster.core.state.calls]
        assert not left, f"calls {left} do not end"
        assert set(self.cluster.ended) == {f"c{number}" for number in range(self.count)}
        self.agree()
        self.each_library_ended_once()
        self.cluster.check()


TestCores = Cores.TestCase
TestCores.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
