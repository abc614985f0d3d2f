"""Build clusters for tests: `cluster(pilots=3).call("c1")` sends events to the manager core, `hears` returns messages
of the core to a peer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from core.desk import SESSION, Desk

from stoker.contexts.recipe import BARE, Needs, Recipe
from stoker.manager.core import events
from stoker.manager.core.nouns import Call, Context, Gang, Library, Pilot
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockOrder, BlockPhase, Source
from stoker.protocol.calls import CallEnd, CallOptions, CallProgress, CallSpec, Failure, FailureKind, Features
from stoker.protocol.ids import BlockId, RecipeKey, make_call_id
from stoker.units import parse_bytes

M = TypeVar("M")
DIED = Failure(FailureKind.DIED, "ended by signal 9 (killed)", signal=9, tail="last words")
BROKEN = Failure(FailureKind.CONTEXT, "FileNotFoundError: no such model")


def recipe(
    name: str, *, memory: str = "", slots: int = 1, calls_per_library: int = 0, longest_input: int = 0, **needs: Any
) -> Recipe:
    wants = Needs(memory_bytes=parse_bytes(memory) if memory else 0, **needs)
    return Recipe(
        name, name, b"loader", needs=wants, slots=slots, calls_per_library=calls_per_library,
        longest_input=longest_input,
    )  # fmt: skip


def devices(count: int, *, kind: str = "cpu", memory: str = "8 GB") -> tuple[say.DeviceFacts, ...]:
    name = "cpu" if kind == "cpu" else "cuda"
    return tuple(say.DeviceFacts(f"{name}:{n}", kind, parse_bytes(memory)) for n in range(count))


class Cluster(Desk):
    """A client `ana`, pilots `p1`, `p2`, ..., and all unread messages to them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mail: dict[str, deque[Any]] = {}
        self.ended: dict[str, CallEnd] = {}
        self.names: dict[int, str] = {}
        self.ids: dict[str, int] = {}
        self.over = ""
        self._received: dict[str, int] = {}
        self._frames: dict[str, int] = {}
        self._facts: dict[str, say.PilotHello] = {}
        self.others: list[events.Command] = []
        self.client("ana")

    # ---- events
    def client(self, name: str, *, observer: bool = False, received: int = 0) -> Cluster:
        self.client_hello(name, received=received, observer=observer)
        if not observer:
            self.tell(name, say.DefineRecipe(BARE), say.DefineFunction("f", "f", b"code of f"))
        return self

    def client_hello(self, name: str, **facts: Any) -> Cluster:
        return self.tell(name, say.ClientHello(wire.VERSION, SESSION, **facts), numbered=False)

    def define(self, *recipes: Recipe) -> Cluster:
        return self.tell("ana", *(say.DefineRecipe(recipe) for recipe in recipes))

    def join(
        self, *names: str, of: tuple[say.DeviceFacts, ...] | None = None, block: str = "", ends_in_s: float = 0.0,
        sleepers: str = "0 B",
    ) -> Cluster:  # fmt: skip
        for name in names:
            there = devices(1) if of is None else of
            self.hello(name, devices=there, block=block, ends_in_s=ends_in_s, sleeper_bytes=parse_bytes(sleepers))
            self.hears(name, to_pilot.PilotWelcome)
        return self

    def hello(self, name: str, **facts: Any) -> Cluster:
        """Send the hello of a pilot. The facts that are not given are those of its first hello."""
        first = self._facts.get(name) or say.PilotHello(wire.VERSION, SESSION, f"host-{name}", 7, devices(1))
        hello = msgspec.structs.replace(first, **facts)
        self._facts.setdefault(name, hello)
        return self.report(name, hello, numbered=False)

    def sources(self, *sources: Source) -> Cluster:
        self.event(events.SessionDefined(sources))
        self.client_hello("factory", factory=True)
        self.hears("factory", to_client.KnownBlocks)
        return self

    def block_orders(self) -> list[BlockOrder]:
        """Read the unread orders to submit blocks."""
        mail = self.mail.get("factory", deque())
        orders = [message for message in mail if isinstance(message, to_client.SubmitBlocks)]
        for message in orders:
            mail.remove(message)
        return [order for message in orders for order in message.orders]

    def asked(self) -> list[str]:
        return [order.block for order in self.block_orders()]

    def block(self, *ids: str, phase: BlockPhase, reason: str = "", **how: Any) -> Cluster:
        return self.tell("factory", *(say.BlockUpdate(BlockId(id), phase, f"job-{id}", reason, **how) for id in ids))

    def call(
        self, *names: str, context: str = "bare", function: str = "f", client: str = "ana",
        features: Features | None = None, due_in_s: float | None = None, **how: Any,
    ) -> Cluster:  # fmt: skip
        number = self.core.state.clients[client].number
        specs = []
        for name in names:
            id = make_call_id(client=max(number, 0), sequence=len(self.ids) + 1)
            self.ids[name], self.names[id] = id, name
            specs.append(CallSpec(id, b"arguments", features=features))
        return self.tell(client, say.Submit(function, context, specs, CallOptions(**how), due_in_s))

    def calls(self, count: int, **how: Any) -> Cluster:
        """Submit `count` calls named `"1"`, `"2"`, ..."""
        return self.call(*(str(len(self.ids) + n + 1) for n in range(count)), **how)

    def tell(self, client: str, *messages: Any, numbered: bool = True) -> Cluster:
        self._post(self.give(events.FromClient(client, self._number(client, numbered), list(messages))))
        return self

    def report(self, pilot: str, *messages: Any, numbered: bool = True) -> Cluster:
        self._post(self.give(events.FromPilot(pilot, self._number(pilot, numbered), list(messages))))
        return self

    def event(self, event: Any) -> Cluster:
        self._post(self.give(event))
        return self

    def advise(self, key: str, by_kind: dict[str, events.ContextAdvice], source: str = "history") -> Cluster:
        return self.event(events.AdviceArrived(events.OfContext(RecipeKey(key)), events.CostAdvice(by_kind), source))

    def cut(self, pilot: str) -> Cluster:
        self.mail.pop(pilot, None)
        return self.event(events.PilotCut(pilot))

    def lose(self, pilot: str) -> Cluster:
        self.mail.pop(pilot, None)
        return self.event(events.PilotLost(pilot, "silent for 15 s"))

    def come_back(self, pilot: str, *, acknowledged: int | None = None, **libraries: tuple[str, ...]) -> Cluster:
        """Reconnect a pilot with ready libraries (`lib1=("c1",)`). `acknowledged`: number of the last frame before the
        hello (None: latest).
        """
        facts, gone = [], self.core.state.gone_pilots.get(pilot)
        for name, calls in libraries.items():
            id = int(name.removeprefix("lib"))
            library = (
                gone.restorable_libraries[id][0]
                if gone is not None and gone.restorable_libraries
                else self.core.state.libraries[id]
            )
            facts.append(
                say.LibraryFacts(
                    library.id, library.context.recipe.key, tuple(d.id for d in library.devices), True,
                    tuple(self.ids[call] for call in calls),
                )
            )  # fmt: skip
        taken = self.taken(pilot) if acknowledged is None else acknowledged
        self.hello(pilot, libraries=tuple(facts), acknowledged=taken, block="", ends_in_s=0.0, sleeper_bytes=0)
        mail = self.mail[pilot]
        answer = next(
            m for m in mail if isinstance(m, to_pilot.PilotWelcome | to_pilot.HelloAgain | to_pilot.PilotRefused)
        )
        if mail[0] is answer and isinstance(answer, to_pilot.PilotWelcome):
            mail.popleft()
        return self

    def taken(self, pilot: str) -> int:
        state = self.core.state
        known = state.pilots.get(pilot) or state.gone_pilots.get(pilot)
        return known.inbox.last if known is not None else 0

    def ready(self, *, load_s: float = 1.0, memory: str = "0 B", only: str = "", sleeps: bool = False) -> Cluster:
        size = parse_bytes(memory)
        for name, mail in self.mail.items():
            starts = [x for x in mail if isinstance(x, to_pilot.StartLibrary) and only in ("", name)]
            for start in starts:
                mail.remove(start)
                self.report(name, say.LibraryReady(start.library, 0.1, load_s, size, size, size, sleeps=sleeps))
        return self

    def asleep(self, library: Library, *, keeps: str = "0 B", host: str = "0 B", sleep_s: float = 0.2) -> Cluster:
        sizes = parse_bytes(keeps), parse_bytes(host)
        return self.report(library.pilot.id, say.LibraryAsleep(library.id, *sizes, sleep_s))

    def awake(self, library: Library, *, wake_s: float = 0.3, refused: str = "") -> Cluster:
        """Report that a library is awake, with the reservation from before its sleep."""
        return self.report(library.pilot.id, say.LibraryAwake(library.id, library.awake_bytes, wake_s, refused))

    def hot(self, *, run_s: float = 0.0, context: str = "bare", **how: Any) -> Cluster:
        self.ready(**how)
        if run_s:
            for library in list(self.core.state.contexts[context].libraries.values()):
                if not library.held:
                    self.calls(1, context=context)
            self.end(*[self.names[id] for id in self.core.state.calls], run_s=run_s)
        self.mail.clear()
        return self

    def end(
        self, *names: str, run_s: float = 1.0, ok: bool = True, failure: Failure | None = None, **more: Any
    ) -> Cluster:
        ok = ok and failure is None
        by_library: dict[Library, list[CallEnd]] = {}
        for name in names:
            for library in self.holders(name):
                end = CallEnd(self.ids[name], ok, name.encode(), run_s, failure, **more)
                by_library.setdefault(library, []).append(end)
        for library, ends in by_library.items():
            self.report(library.pilot.id, say.CallsEnded(library.id, ends))
        return self

    def progress(
        self, name: str, done: float = 0.0, total: float = 0.0, *, state: bytes = b"", rank: int = 0
    ) -> Cluster:
        library = self.holders(name)[rank]
        said = CallProgress(self.ids[name], done, total, 0.0, state)
        return self.report(library.pilot.id, say.CallsProgress(library.id, [said]))

    def let_go(self) -> Cluster:
        """Report that libraries returned their withdrawn calls, which frees the slots."""
        for library in tuple(self.core.state.libraries.values()):
            if library.withdrawn_calls:
                self.report(library.pilot.id, say.CallsReturned(library.id, tuple(library.withdrawn_calls)))
        return self

    def die(self, library: Library, *running: str, failure: Failure | None = DIED, loading: bool = False) -> Cluster:
        ran = tuple(self.ids[name] for name in running)
        rest = tuple(id for id in library.held if id not in ran)
        return self.report(library.pilot.id, say.LibraryGone(library.id, failure, loading, ran, rest))

    def fail_load(self, library: Library) -> Cluster:
        return self.die(library, failure=BROKEN, loading=True)

    def give_back(self, *names: str, refused: str = "") -> Cluster:
        for library in {library: None for name in names for library in self.holders(name)}:
            back = tuple(self.ids[name] for name in names if self.ids[name] in library.held)
            self.report(library.pilot.id, say.CallsReturned(library.id, back, refused))
        return self

    def wait(self, seconds: float) -> Cluster:
        until = self.now + seconds
        timers = self.core.state.timers
        while timers and min(timers.values()) <= until:
            key = min(timers, key=lambda key: (timers[key], key))
            self.now = max(self.now, timers[key])
            self.event(events.TimerFired(key))
        self.now = until
        return self

    # ---- queries
    def the_call(self, name: str) -> Call:
        return self.core.state.calls[self.ids[name]]

    def failure(self, name: str) -> Failure:
        failure = self.ended[name].failure
        assert failure is not None, f"{name} did not fail"
        return failure

    def holders(self, name: str) -> tuple[Library, ...]:
        holder = self.the_call(name).holder
        assert holder is not None, f"{name} is held by nobody"
        return holder.members if isinstance(holder, Gang) else (holder,)

    def pilot_of(self, name: str) -> str:
        return str(self.holders(name)[0].pilot.id)

    def library(self, pilot: str = "p1", context: str = "bare") -> Library:
        found = [x for x in self.pilot(pilot).libraries.values() if x.context.recipe.key == context]
        assert len(found) == 1, f"{len(found)} libraries of {context} on {pilot}"
        return found[0]

    def pilot(self, name: str = "p1") -> Pilot:
        return self.core.state.pilots[name]

    def context(self, key: str = "bare") -> Context:
        return self.core.state.contexts[key]

    def waiting(self, context: str = "bare") -> list[str]:
        return [self.names[call.id] for call in self.context(context).queue]

    def held(self, pilot: str = "p1", context: str = "bare") -> list[str]:
        return [self.names[id] for id in self.library(pilot, context).held]

    def lives_on(self, context: str = "bare") -> list[str]:
        return sorted(x.pilot.id for x in self.context(context).libraries.values())

    @property
    def refused(self) -> dict[str, int]:
        return self.core.state.refused

    def status(self, client: str = "ana") -> to_client.Status:
        self.tell(client, say.AskStatus(), numbered=False)
        return self.hears(client, to_client.Status)

    def the_story(self, subject: str) -> to_client.Story:
        self.tell("ana", say.AskStory(subject), numbered=False)
        return self.hears("ana", to_client.Story)

    def story(self, subject: str) -> str:
        story = self.the_story(subject)
        return "\n".join([story.headline, *(line.text for line in story.lines)])

    # ---- messages
    def commands(self, kind: type[M]) -> list[M]:
        return [command for command in self.others if isinstance(command, kind)]

    def hears(self, peer: str, kind: type[M]) -> M:
        mail = self.mail.get(peer)
        assert mail, f"{peer} was told nothing, not even {kind.__name__}"
        message = mail.popleft()
        assert isinstance(message, kind), f"{peer} was told {message}"
        return message

    def runs(self, pilot: str) -> list[str]:
        return [self.names[spec.call] for spec in self.hears(pilot, to_pilot.RunCalls).calls]

    def nothing_else_was_said(self) -> None:
        left = {peer: list(mail) for peer, mail in self.mail.items() if mail}
        assert not left, f"this was said too: {left}"

    def forget(self) -> Cluster:
        self.mail.clear()
        return self

    # ---- delivery
    def _number(self, peer: str, numbered: bool) -> int:
        if numbered:
            self._frames[peer] = self._frames.get(peer, 0) + 1
        return self._frames[peer] if numbered else 0

    def _post(self, commands: list[events.Command]) -> None:
        for command in commands:
            match command:
                case events.ToPilot(_, to_pilot.Ack()) | events.ToClient(_, to_client.Ack()) | events.SetTimer():
                    pass
                case events.ToClient(_, to_client.ClientWelcome(again=False)):
                    pass
                case events.ToClient(client, to_client.Results() as results):
                    self._results(client, results)
                case events.ToPilot(peer, message):
                    self.mail.setdefault(peer, deque()).append(message)
                case events.ToClient(peer, message):
                    self.mail.setdefault(peer, deque()).append(message)
                case events.EndManager(reason):
                    self.over = reason
                case _:
                    self.others.append(command)

    def _results(self, client: str, results: to_client.Results) -> None:
        """Check that no result is missing and that each call ends once; ignore repeated results."""
        had = self._received.get(client, 0)
        assert results.first <= had, "results were skipped"
        for end in results.ends[had - results.first :]:
            name = self.names[end.call]
            assert name not in self.ended, f"{name} ended twice"
            self.ended[name] = end
            had += 1
        self._received[client] = had


Make = Callable[..., Cluster]
"""The fixture `cluster`."""


def cluster(*, pilots: int = 0, devices_each: int = 1, memory: str = "8 GB", **options: Any) -> Cluster:
    made = Cluster(**options)
    return made.join(*(f"p{n + 1}" for n in range(pilots)), of=devices(devices_each, memory=memory))
