"""A simulated program, which submits calls at their arrival times and counts their results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from stoker.contexts.recipe import Awareness, LibraryLimits, Needs, Recipe
from stoker.manager.core.events import FromClient
from stoker.manager.sim.log import TokenTimes
from stoker.manager.sim.pilot import make_object_ref
from stoker.manager.sim.runs import SimulationBase
from stoker.manager.sim.world import ContextModel
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.calls import CallOptions, CallSpec, Features, Objective
from stoker.protocol.ids import CallId, ClientId, FunctionKey, RecipeKey, make_call_id

NO_OBJECTIVE = Objective()
_SUBMITTED_TOGETHER = attrgetter("context", "priority", "deadline_s", "gang", "objective", "variants")
RESULTS_PER_ACKNOWLEDGEMENT = 1000  # Number of results that one message acknowledges


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A call and its arrival time. Lengths are in tokens, and 0 means none or unknown.

    `deadline_s`: seconds from the arrival to the deadline. `gang`: minimum and maximum number of libraries.
    `fixed_s`: seconds before the first item. `shared_s`: more such seconds, divided by the gang's size. `items_done`:
    number of items after which the call ends (0 = all), unknown to policies. `output`: tokens that an engine writes (0
    = `expected_output`). Policies see `expected_output` (0 = mean output of ended calls) and `most_output`, the tokens
    of the longest answer. `variants`: other contexts for the call, best first.
    """

    at_s: float
    context: str
    items: int = 1
    input_length: int = 0
    expected_output: int = 0
    priority: int = 0
    deadline_s: float = 0.0
    gang: tuple[int, int] = (1, 1)
    fixed_s: float = 0.0
    items_done: int = 0
    output: int = 0
    objective: Objective = NO_OBJECTIVE
    variants: tuple[str, ...] = ()
    shared_s: float = 0.0
    most_output: int = 0

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.input_length)

    @property
    def output_tokens(self) -> int:
        return self.output or self.expected_output or 1


class SimClient:
    def __init__(self, sim: SimulationBase, arrivals: Iterable[Arrival]) -> None:
        self.id = ClientId("client")
        self._sim = sim
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._next: Arrival | None = next(self._arrivals, None)
        self._defined: set[str] = set()
        self.submitted = self.ended = self.items_done = self._unacknowledged = 0
        self.failed: dict[str, int] = {}
        self._collects_for_s = sim.client_collects_for_s
        self._items: dict[int, int] = {}
        self._written: dict[CallId, tuple[str, int]] = {}  # Context and output tokens of each open call
        self._outputs: dict[str, tuple[int, float]] = {}  # By context: number of ended calls, mean output tokens

    @property
    def is_done(self) -> bool:
        return self._next is None and self.ended == self.submitted

    def start(self) -> None:
        self._send_to_manager(to_manager.ClientHello(wire.VERSION, self._sim.session))
        self._schedule_next_submission()

    def _schedule_next_submission(self) -> None:
        if self._next is not None:
            self._sim.agenda.schedule_at(self._next.at_s + self._collects_for_s, self._submit_arrived_calls)

    def _submit_arrived_calls(self) -> None:
        now, arrived = self._sim.agenda.now, list[Arrival]()
        while self._next is not None and round(self._next.at_s, 6) <= now:
            arrived.append(self._next)
            self._next = next(self._arrivals, None)
        recipes: list[to_manager.FromClient] = []
        submits: list[to_manager.Submit] = []
        for _, group in groupby(arrived, key=_SUBMITTED_TOGETHER):
            calls = list(group)
            for name in (calls[0].context, *calls[0].variants):
                if name not in self._defined:
                    self._defined.add(name)
                    recipes.append(to_manager.DefineRecipe(make_recipe(name, self._sim.world.contexts[name])))
                    recipes.append(to_manager.DefineFunction(FunctionKey(name), name, b""))
            submits.append(self._make_submit_message(calls))
        self._send_to_manager(*recipes, *submits)
        self._schedule_next_submission()

    def _make_submit_message(self, arrivals: list[Arrival]) -> to_manager.Submit:
        sim, first, now, calls = self._sim, arrivals[0], self._sim.agenda.now, list[CallSpec]()
        for arrival in arrivals:
            call = make_call_id(client=0, sequence=self.submitted)
            expected = arrival.expected_output or round(self._outputs.get(arrival.context, (0, 0.0))[1])
            features = Features(
                arrival.items, arrival.input_length, expected, arrival.fixed_s, shared_s=arrival.shared_s,
                most_output=arrival.most_output,
            )  # fmt: skip
            calls.append(CallSpec(call, b"", features))
            self._items[call] = arrival.items_done or arrival.items
            if arrival.items_done:
                sim.true_items[call] = arrival.items_done
            came_at = arrival.at_s if self._collects_for_s else now
            due_at = arrival.at_s + arrival.deadline_s if arrival.deadline_s else 0.0
            sim.calls_log.log_arrival(came_at, call, items=arrival.items, due_at=due_at)
            self._start_token_tracking(call, arrival, came_at=came_at)
            self.submitted += 1
        deadline_at = first.at_s + first.deadline_s if first.deadline_s else 0.0
        options = CallOptions(
            priority=first.priority,
            objective=replace(self._honoured_objective(first.objective), deadline_at=deadline_at),
            gang=first.gang, variants=tuple(map(RecipeKey, first.variants)) if "variants" in sim.honours else (),
        )  # fmt: skip
        return to_manager.Submit(FunctionKey(first.context), RecipeKey(first.context), calls, options)

    def _honoured_objective(self, wanted: Objective) -> Objective:
        honours = self._sim.honours
        if "ttft_s" not in honours:
            wanted = replace(wanted, ttft_s=0.0, ttft_per_token_s=0.0, ttft_most_s=0.0)
        if "latency_s" not in honours:
            wanted = replace(wanted, latency_s=0.0)
        return wanted if "tpot_s" in honours else replace(wanted, tpot_s=0.0)

    def _start_token_tracking(self, call: CallId, arrival: Arrival, *, came_at: float) -> None:
        if arrival.output:
            self._written[call] = arrival.context, arrival.output
        if self._sim.world.contexts[arrival.context].engine:
            ttft_s = arrival.objective.first_token_s(arrival.prompt_tokens)
            due_at = came_at + ttft_s if ttft_s else math.inf
            self._sim.tokens[call] = TokenTimes(
                came_at, arrival.prompt_tokens, arrival.output_tokens, due_at,
                arrival.objective.tpot_s if ttft_s else 0.0, most=arrival.most_output,
            )  # fmt: skip

    def _send_to_manager(self, *messages: to_manager.FromClient) -> None:
        self._sim.handle(FromClient(self.id, 0, list(messages)))

    def handle_results(self, message: to_client.Results) -> None:
        for end in message.ends:
            items = self._items.pop(end.call)
            self._sim.true_items.pop(end.call, None)
            self._sim.gathering_runs.pop(end.call, None)
            times = self._sim.tokens.pop(end.call, None)
            if times is not None:
                self._sim.calls_log.log_token_times(self._sim.agenda.now, end.call, times, ok=end.ok)
            context, output = self._written.pop(end.call, ("", 0))
            if output:
                count, mean = self._outputs.get(context, (0, 0.0))
                self._outputs[context] = count + 1, mean + (output - mean) / (count + 1)
            self.ended += 1
            if end.ok:
                self.items_done += items
            else:
                why = end.failure.message if end.failure is not None else "exception"
                self.failed[why] = self.failed.get(why, 0) + 1
                self._sim.calls_log.log_failure(self._sim.agenda.now, end.call, items=items)
        if self.is_done:
            self._sim.agenda.stop_running()
        self._unacknowledged += len(message.ends)
        if self._unacknowledged >= RESULTS_PER_ACKNOWLEDGEMENT:
            self._unacknowledged = 0
            self._sim.agenda.schedule_after(0.0, self._send_to_manager, to_manager.Received(self.ended))


def make_recipe(name: str, model: ContextModel) -> Recipe:
    kept = model.awareness is not Awareness.NONE
    engine = model.engine_on_device_kind(model.kinds[0] if model.kinds else "")
    grows = engine is not None and engine.token_bytes > 0
    needs = Needs(
        model.devices, device_memory_bytes=int(model.device_memory_bytes), kinds=model.kinds,
        token_bytes=engine.token_bytes if engine is not None else 0,
        cache_tokens=(
            engine.make_batch_limits(model.device_memory_bytes).cache_tokens if engine is not None and grows else 0
        ),
    )  # fmt: skip
    return Recipe(
        key=name, name=name, loader=b"simulated", needs=needs, slots=model.slots, awareness=model.awareness,
        objects=tuple(make_object_ref(files.name, files.size_bytes) for files in model.files) if kept else (),
        calls_per_library=0 if model.awareness is Awareness.FULL else 1,
        limits=LibraryLimits(model.min_libraries, model.max_libraries, model.keep_alive_s),
        longest_input=model.longest_input,
    )  # fmt: skip
