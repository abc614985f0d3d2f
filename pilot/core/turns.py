"""Decides which call a library runs next, which library computes next, and whether one more request fits.

Libraries that share devices compute one iteration at a time: one step of an engine, or a whole call of a library
without an engine. The library with the shortest headroom (time until its next token is due) goes first (SLINFER §VI-A,
eq. 1). To prevent starvation, the due time is never before the library requested its turn, and never more than
`MAX_HEADROOM_S` seconds later.

Shadow validation (SLINFER §VI-C) simulates the turns after a request joins an engine, with measured step times plus 10
%. It refuses the request if

1. the first token of the request would be late,
2. a token of another request on the device would be late, or
3. one decode step of every engine takes longer than the time per output token.

Requests that are already late do not count. The simulation ends when all prompts are read and each engine has had one
more turn.

Case 3 assumes that answers never end, but a short answer may end before its tokens are late. Therefore, if the maximum
answer length of every request is known, the simulation continues until all answers end, and replaces case 3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from stoker.protocol.calls import RefusalCase
from stoker.protocol.ids import CallId, DeviceId, LibraryId

T = TypeVar("T")


class CallQueue(Generic[T]):
    """The waiting calls of a library, first come, first served. Operations are atomic under CPython's GIL."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[CallId, T]] = deque()

    def add(self, call: CallId, work: T) -> None:
        self._waiting.append((call, work))

    def take_first(self) -> tuple[CallId, T] | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def peek(self) -> tuple[CallId, T] | None:
        try:
            return self._waiting[0]
        except IndexError:
            return None

    def remove_entry(self, entry: tuple[CallId, T]) -> bool:
        """Remove an entry that `peek` returned. Return False if the entry is no longer in the queue."""
        try:
            self._waiting.remove(entry)  # atomic: runs in C, and compares only call ids
        except ValueError:
            return False
        return True

    def remove_newest(self, count: int) -> list[CallId]:
        """Remove up to `count` calls from the queue, newest first."""
        out: list[CallId] = []
        while len(out) < count:
            try:
                out.append(self._waiting.pop()[0])
            except IndexError:
                break
        return out

    def remove_calls(self, calls: Iterable[CallId]) -> list[CallId]:
        wanted = set(calls)
        return [entry[0] for entry in tuple(self._waiting) if entry[0] in wanted and self.remove_entry(entry)]

    def __len__(self) -> int:
        return len(self._waiting)


# ---- turns on a device
MAX_HEADROOM_S = 8.0  # seconds; upper limit of the headroom: SLINFER's longest time to first token (§IV-A)


class TurnRequest(NamedTuple):
    """A library's request for its turn to compute. `due_at`: due time of the library's most urgent token."""

    library: LibraryId
    devices: tuple[DeviceId, ...]
    due_at: float
    since: float


def choose_next_turns(requests: Iterable[TurnRequest], busy: Collection[DeviceId]) -> list[LibraryId]:
    taken, chosen = set(busy), list[LibraryId]()
    for request in sorted(requests, key=_urgency_key):
        if taken.isdisjoint(request.devices):
            chosen.append(request.library)
        taken.update(request.devices)
    return chosen


def _urgency_key(request: TurnRequest) -> tuple[float, float, LibraryId]:
    due_at = max(request.since, min(request.due_at, request.since + MAX_HEADROOM_S))
    return due_at, request.since, request.library


# ---- one more request
STEP_TIME_MARGIN = 1.1  # safety factor for measured step times (SLINFER §VI-C)

_MOST_TURNS = 64  # maximum simulated steps of engines: with more prompts, some tokens are always late
_MOST_LAST_TURNS = 512  # maximum simulated steps until all answers end; after that, one step per engine is checked


class StepCost(Protocol):
    """Step times of a model on a kind of device, in seconds."""

    def prefill_s(self, tokens: int, length: float) -> float:
        """Return the seconds to process `tokens` tokens of a prompt, if each attends to `length` tokens on average."""

    def decode_s(self, rows: int, length: float) -> list[float]:
        """Return a list whose first element is the seconds of one decode step, for `rows` requests of mean length
        `length`.
        """


class UnreadPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt that an engine has not processed yet. `due_at`: due time of the first token (infinity without a latency
    objective); `tpot_s`: seconds per later token; `most`: maximum tokens of the answer (0: unknown).
    """

    tokens: int
    due_at: float = math.inf
    tpot_s: float = 0.0
    most: int = 0


class OpenAnswer(NamedTuple):
    """A request that generates up to `left` more tokens: the next is due at `due_at`, later tokens every `tpot_s`."""

    due_at: float
    tpot_s: float
    left: int


class LateRefusal(NamedTuple):
    case: RefusalCase
    why: str


class EngineOutlook(msgspec.Struct, frozen=True, gc=False):
    """The open requests of one library's engine.

    `rows` requests of mean length `length` generate tokens. `due_at`: due time of the most urgent token that is not
    late; `late_at`: due time of the most urgent late token; `prompts`: unread prompts, most urgent first; `ready_at`:
    end of a cache resize; `answers`: the requests among `rows` whose maximum answer length is known.
    """

    library: LibraryId
    cost: StepCost
    rows: int = 0
    length: float = 0.0
    due_at: float = math.inf
    tpot_s: float = 0.0
    prompts: tuple[UnreadPrompt, ...] = ()
    late_at: float = math.inf
    ready_at: float = 0.0
    answers: tuple[OpenAnswer, ...] = ()


class _SimulatedEngine:
    __slots__ = ("answers", "cost", "decode_s", "due_at", "late_at", "length", "prompts", "read_last", "ready_at",
                 "rows", "since", "steps", "tpot_s")  # fmt: skip

    def __init__(self, outlook: EngineOutlook, prompts: list[UnreadPrompt], *, since: float) -> None:
        self.cost = outlook.cost
        self.rows = outlook.rows
        self.length = outlook.length
        self.due_at = outlook.due_at
        self.tpot_s = outlook.tpot_s
        self.prompts = prompts
        self.read_last = False  # True if the last step processed a prompt, so that the next step decodes
        self.ready_at = outlook.ready_at
        self.late_at = outlook.late_at
        self.since = since  # when the engine requested its turn
        self.steps = 0
        self.answers = [(*answer, answer.due_at >= since) for answer in outlook.answers]  # False: already late
        self.decode_s = self._decode_s() if self.rows else 0.0

    @property
    def has_known_ends(self) -> bool:
        return len(self.answers) == self.rows and all(prompt.most for prompt in self.prompts)

    def urgency(self) -> float:
        due_at = self.due_at
        if self.late_at < due_at:
            due_at = self.late_at
        if self.prompts and self.prompts[0].due_at < due_at:
            due_at = self.prompts[0].due_at
        since = self.since
        return since if due_at < since else min(due_at, since + MAX_HEADROOM_S)

    def add_request(self, prompt: UnreadPrompt, at: float, *, counts: bool) -> None:
        self.length = (self.length * self.rows + prompt.tokens + 1) / (self.rows + 1)
        self.rows += 1
        self.decode_s = self._decode_s()
        if prompt.most:
            due_at = prompt.due_at - (self.steps - 1) * prompt.tpot_s
            self.answers.append((due_at, prompt.tpot_s, self.steps + prompt.most - 1, counts))
        if prompt.tpot_s:
            due_at = prompt.due_at + prompt.tpot_s
            self.due_at = min(self.due_at, due_at if due_at > at else math.inf)
            self.tpot_s = min(self.tpot_s, prompt.tpot_s) if self.tpot_s else prompt.tpot_s

    def record_decode_step(self) -> None:
        """Count a decode step, and remove the answers that end with this step."""
        self.steps += 1
        self.due_at += self.tpot_s or math.inf
        self.late_at += self.tpot_s or math.inf
        self.read_last = False
        if len(self.answers) != self.rows or all(to > self.steps for _, _, to, _ in self.answers):
            return
        self.answers = [each for each in self.answers if each[2] > self.steps]
        self.rows = len(self.answers)
        dues = [(at + self.steps * tpot_s, counts) for at, tpot_s, _, counts in self.answers if tpot_s]
        self.due_at = min((at for at, counts in dues if counts), default=math.inf)
        self.late_at = min((at for at, counts in dues if not counts), default=math.inf)
        self.decode_s = self._decode_s() if self.rows else 0.0

    def decode_step_s_after_prompts(self) -> float:
        if not self.prompts:
            return self.decode_s
        rows = self.rows + len(self.prompts)
        length = (self.length * self.rows + sum(prompt.tokens + 1 for prompt in self.prompts)) / rows
        return STEP_TIME_MARGIN * self.cost.decode_s(rows, length)[0]

    def _decode_s(self) -> float:
        return STEP_TIME_MARGIN * self.cost.decode_s(self.rows, self.length)[0]


def refuse_if_late(
    engines: Iterable[EngineOutlook], to: LibraryId, new: UnreadPrompt, *, now: float, free_at: float
) -> LateRefusal | None:
    """Return why a request should not join the engine of the library `to`; None if the request may join."""
    players, tpot_s = _simulated_engines(engines, to, new, now=now)
    cycle_s = sum(player.decode_step_s_after_prompts() for player in players)
    is_over = 0 < tpot_s < cycle_s  # check case 3 first: it is cheap
    if is_over and not all(player.has_known_ends for player in players):
        return _make_decode_round_refusal(cycle_s, tpot_s)
    at, late = _simulate_prompts(players, new, at=max(now, free_at))
    if late is not None or not is_over:
        return late
    return _simulate_until_end(players, tpot_s, at=at)


def _make_decode_round_refusal(cycle_s: float, tpot_s: float) -> LateRefusal:
    why = f"one decode step of every engine would take {_show_ms(cycle_s)}, and tpot is {_show_ms(tpot_s)}"
    return LateRefusal(RefusalCase.DECODE_ROUND, why)


def decode_excess_s(engines: Iterable[EngineOutlook], to: LibraryId, new: UnreadPrompt) -> float:
    """Return the seconds by which a round of one decode step per engine exceeds the time per output token (case 3)."""
    players, tpot_s = _simulated_engines(engines, to, new, now=0.0)
    return max(0.0, sum(player.decode_step_s_after_prompts() for player in players) - tpot_s) if tpot_s else 0.0


def _simulated_engines(
    engines: Iterable[EngineOutlook], to: LibraryId, new: UnreadPrompt, *, now: float
) -> tuple[list[_SimulatedEngine], float]:
    """Return the engines that have work once the new request joins, and the shortest time per output token (0:
    none).
    """
    players, tpot_s = list[_SimulatedEngine](), new.tpot_s
    for outlook in engines:
        prompts = list(outlook.prompts)
        if outlook.library == to:
            prompts.insert(sum(prompt.due_at <= new.due_at for prompt in prompts), new)
        if prompts or outlook.rows:
            players.append(_SimulatedEngine(outlook, prompts, since=now))
            for each_s in (outlook.tpot_s, *(prompt.tpot_s for prompt in outlook.prompts)):
                if 0 < each_s < tpot_s or not tpot_s:
                    tpot_s = each_s
    return players, tpot_s


def _simulate_prompts(
    players: list[_SimulatedEngine], new: UnreadPrompt, *, at: float
) -> tuple[float, LateRefusal | None]:
    """Simulate until each engine has run a step after the last prompt is processed. Return the end time, and a refusal
    (case 1 or 2) or None.
    """
    unread, started = sum(len(player.prompts) for player in players), at
    left = players  # engines that have run no step since the last prompt was processed
    for _ in range(_MOST_TURNS):
        ready = [each for each in left if each.ready_at <= at]
        if not ready:
            at = min(each.ready_at for each in left)
            continue
        player = ready[0] if len(ready) == 1 else min(ready, key=_SimulatedEngine.urgency)
        prompt = player.prompts.pop(0) if player.prompts and not (player.read_last and player.rows) else None
        if prompt is not None:
            at += STEP_TIME_MARGIN * player.cost.prefill_s(prompt.tokens, prompt.tokens / 2)
            if at > prompt.due_at >= started:
                by = f"would be {_show_ms(at - prompt.due_at)} late"
                if prompt is new:
                    return at, LateRefusal(RefusalCase.FIRST_TOKEN, f"its first token {by}")
                return at, LateRefusal(RefusalCase.OTHERS, f"the first token of another request {by}")
            player.add_request(prompt, at, counts=prompt.due_at >= started)
            player.read_last = True
            unread -= 1
        else:
            at += player.decode_s
            if at > player.due_at:
                by = f"would be {_show_ms(at - player.due_at)} late"
                return at, LateRefusal(RefusalCase.OTHERS, f"a token of another request {by}")
            player.record_decode_step()
            if not unread or not (player.rows or player.prompts):
                left = [other for other in left if other is not player]
                if not left:
                    break
        player.since = at
    return at, None


def _show_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


class _StepGroup(NamedTuple):
    """Consecutive decode steps of an engine for an unchanged set of requests, up to step number `last_step`. `due_at`:
    due time of the first token that is not late; `urgent_at`: due time of the most urgent token.
    """

    last_step: int
    step_s: float
    due_at: float
    urgent_at: float
    tpot_s: float


def _group_decode_steps(player: _SimulatedEngine) -> list[_StepGroup]:
    """Return the decode steps of an engine until its last answer ends, in groups with the same requests, latest first.

    Each group uses the step time at its end, the earliest due time, and the shortest time per output token.
    """
    answers = sorted((each for each in player.answers if each[2] > player.steps), key=lambda each: each[2])
    found, begins = list[_StepGroup](), player.steps
    for number, (_, _, to, _) in enumerate(answers):
        if to == begins:
            continue
        dues = [(at + begins * tpot_s, tpot_s, counts) for at, tpot_s, _, counts in answers[number:] if tpot_s]
        due_at = min((at for at, _, counts in dues if counts), default=math.inf)
        urgent_at = min((at for at, _, _ in dues), default=math.inf)
        tpot_s = min((tpot_s for _, tpot_s, _ in dues), default=0.0)
        length = player.length + to - player.steps
        step_s = STEP_TIME_MARGIN * player.cost.decode_s(len(answers) - number, length)[0]
        found.append(_StepGroup(to, step_s, due_at, urgent_at, tpot_s))
        begins = to
    return found[::-1]


def _simulate_until_end(players: list[_SimulatedEngine], tpot_s: float, *, at: float) -> LateRefusal | None:
    """Check case 3 for answers of known length: simulate the engines' steps until all answers have ended."""
    playing: list[tuple[_SimulatedEngine, list[_StepGroup]]] = []
    for player in players:
        if player.prompts:  # the simulation ended before all prompts were processed
            return _make_decode_round_refusal(sum(each.decode_step_s_after_prompts() for each in players), tpot_s)
        if stretches := _group_decode_steps(player):
            player.since = at
            playing.append((player, stretches))
    begun = {player: player.steps for player, _ in playing}
    for _ in range(_MOST_LAST_TURNS):
        if not playing:
            return None
        urgency, chosen = math.inf, playing[0]
        for each in playing:
            player, stretch = each[0], each[1][-1]
            due_at = stretch.urgent_at + (player.steps - begun[player]) * stretch.tpot_s
            due_at = max(player.since, min(due_at, player.since + MAX_HEADROOM_S))
            if due_at < urgency:
                urgency, chosen = due_at, each
        player, stretches = chosen
        stretch = stretches[-1]
        at += stretch.step_s
        due_at = stretch.due_at + (player.steps - begun[player]) * stretch.tpot_s
        if at > due_at:
            return LateRefusal(RefusalCase.DECODE_ROUND, f"a later token would be {_show_ms(at - due_at)} late")
        player.steps += 1
        player.since = at
        if player.steps == stretch.last_step:
            stretches.pop()
            begun[player] = player.steps
            if not stretches:
                playing.remove(chosen)
    cycle_s = sum(stretches[-1].step_s for _, stretches in playing)
    return _make_decode_round_refusal(cycle_s, tpot_s) if cycle_s > tpot_s else None
