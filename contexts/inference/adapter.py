"""The interface of an inference engine, the text that a request has written, and an engine's turns on shared devices.

An engine writes tokens for many requests at once with one model. One thread drives it (`engine_thread`):

    engine.add(request)                  the request waits; ValueError says why it can never run
    for token in engine.step():          one pass through the model; a request's last token has a `finish`
        ...

The contract (tests/engine_contract.py):

- At temperature 0 a request gets the tokens of the model's own `generate`, whatever else is in the batch; with a seed
  they depend on the seed alone. Both up to rounding.
- `abort` frees the request's memory before the next step, in which the request has no part.
- `memory().held_bytes` never exceeds the budget that `resize` has set.
- A request gets the same tokens after `sleep` and `wake` as before.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import msgspec

OWN_OPTIONS = frozenset({"ignore_eos", "stop_token_ids"})
"""Options beyond the common ones that every engine honours."""
VLLM_OPTIONS = OWN_OPTIONS | {
    "json_schema", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
    "min_tokens",
}  # fmt: skip


class OptionNotHonoured(ValueError):
    """An engine cannot do what an option of a request asks for."""

    def __init__(self, option: str) -> None:
        what = "hold a text to a JSON schema" if option == "json_schema" else f"honour {option}"
        super().__init__(f'this engine cannot {what}; causal_lm(engine="vllm") can')
        self.option = option


class Finish(enum.Enum):
    """Why a request has ended."""

    STOP = "stop"
    LENGTH = "length"


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are chosen, as in `CausalLM.generate` and `CausalLM.complete`."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: tuple[int, int] = (0, 0)
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    json_schema: str = ""
    engine_options: tuple[tuple[str, Any], ...] = ()

    def check_honoured(self, honoured: frozenset[str]) -> None:
        for option in (*(["json_schema"] if self.json_schema else []), *(name for name, _ in self.engine_options)):
            if option not in honoured:
                raise OptionNotHonoured(option)

    def ends(self, ends: frozenset[int]) -> frozenset[int]:
        options = dict(self.engine_options)
        return (frozenset() if options.get("ignore_eos") else ends) | frozenset(options.get("stop_token_ids", ()))


class GenerationRequest(msgspec.Struct, frozen=True):
    """A prompt as token ids, and how to continue it. Its first token is due at `due_at` (time.monotonic), each further
    one `tpot_s` later. Without `pieces` only the last `NewToken` has text."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    due_at: float = float("inf")
    tpot_s: float = 0.0
    pieces: bool = False


class TokenChance(msgspec.Struct, frozen=True):
    """A token and its log-likelihood (natural logarithm)."""

    token: int
    logprob: float


class NewToken(msgspec.Struct, frozen=True):
    """A token of a step, and the text that it adds. With `finish` the request has ended; with an `error` it has
    failed."""

    request: int
    token: int
    text: str = ""
    finish: Finish | None = None
    logprob: float | None = None
    likeliest: tuple[TokenChance, ...] = ()
    error: str = ""


class EngineMemory(msgspec.Struct, frozen=True):
    """Bytes of weights, current cache, and the cache's budget (0 = none)."""

    weights_bytes: int
    held_bytes: int
    budget_bytes: int


class EngineLoad(msgspec.Struct, frozen=True):
    """How full the batch is: requests that run and wait now, and totals so far. `row_steps` sums requests over decode
    steps."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    most_running: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    busy_s: float = 0.0
    evictions: int = 0
    rows: int = 0
    """Requests that may run at once; 0 if unknown."""

    def after(
        self, *, decoded: int, running: int, prompt_tokens: int, new_tokens: int, busy_s: float, evictions: int = 0
    ) -> EngineLoad:
        return msgspec.structs.replace(
            self, steps=self.steps + 1, decode_steps=self.decode_steps + (decoded > 0),
            row_steps=self.row_steps + decoded, most_running=max(self.most_running, running),
            prompt_tokens=self.prompt_tokens + prompt_tokens, new_tokens=self.new_tokens + new_tokens,
            busy_s=self.busy_s + busy_s, evictions=self.evictions + evictions,
        )  # fmt: skip

    @property
    def mean_rows(self) -> float:
        return self.row_steps / self.decode_steps if self.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens written per second of work."""
        return self.new_tokens / self.busy_s if self.busy_s else 0.0


class InferenceEngine(Protocol):
    """One model, many requests. All methods are called by one thread."""

    name: str
    options: frozenset[str]
    chosen: str
    """Why this engine was chosen, for people."""

    def add(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError if it never can run."""

    def step(self) -> list[NewToken]:
        """Compute one step; return its tokens. Without requests it does nothing."""

    def abort(self, request: int) -> None:
        """Remove the request. No-op if it has ended."""

    def slots(self) -> int:
        """Return how many requests it serves at once within its budget."""

    def load(self) -> EngineLoad:
        """Return how full the batch is."""

    def memory(self) -> EngineMemory:
        """Return the held memory of the device."""

    def resize(self, cache_bytes: int) -> None:
        """Change the budget of the cache. Raises ValueError if no request could run."""

    def sleep(self) -> None:
        """Free the device's memory until `wake`. Raises RuntimeError while requests run."""

    def wake(self) -> None:
        """Be as before `sleep`."""

    def stop(self) -> None:
        """End; no other method is called afterwards."""


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
Decode = Callable[[list[int]], str]


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for an option that no engine can follow."""
    if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"temperature must be 0 or more and top_p in (0, 1]; they are {sampling.temperature} and {sampling.top_p}"
        )
    if type(sampling.max_new_tokens) is not int or sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number, 1 or more, not {sampling.max_new_tokens!r}")
    if type(sampling.logprobs) is not int or sampling.logprobs < 0:
        raise ValueError(f"logprobs must be a whole number, 0 or more, not {sampling.logprobs!r}")
    for stop in sampling.stop:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"a stop text must be a text that is not empty, not {stop!r}")


class ModelTexts:
    """How tokens become text, which ones end it, and how many the model reads (0 = any number)."""

    def __init__(self, *, decode: Decode, ends: frozenset[int], longest: int) -> None:
        self.decode = decode
        self.ends = ends
        self.longest = longest

    def check(self, request: GenerationRequest, *, options: frozenset[str]) -> None:
        """Raise ValueError for a request that such an engine cannot take."""
        sampling = request.sampling
        check_sampling(sampling)
        sampling.check_honoured(options)
        length = len(request.prompt) + sampling.max_new_tokens
        if self.longest and length > self.longest:
            raise ValueError(
                f"the prompt comes to {length} tokens with its continuation; the model reads {self.longest}."
                " Shorten it, or split it"
            )

    def begin(self, request: GenerationRequest) -> Written:
        sampling = request.sampling
        return Written(
            decode=self.decode, ends=sampling.ends(self.ends), most=sampling.max_new_tokens, stop=sampling.stop,
            pieces=request.pieces,
        )  # fmt: skip


class Written:
    """The text of one request. A piece is what the last few tokens add, once its characters are complete."""

    def __init__(
        self, *, decode: Decode, ends: frozenset[int], most: int, stop: Sequence[str] = (), pieces: bool = False
    ) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._decode = decode
        self._ends = ends
        self._most = most
        self._stop = tuple(stop)
        self._follows = pieces or bool(stop)
        self._pieces = pieces
        self._text = ""
        self._given = 0
        self._shown, self._complete = 0, 0

    def add(self, token: int) -> str:
        """Add a token; return the new piece of text."""
        if token in self._ends:
            return self._end(Finish.STOP)
        self.tokens.append(token)
        if self._follows:
            self._extend()
            cut = self._stop_at()
            if cut >= 0:
                self._text = self._text[:cut]
                return self._end(Finish.STOP, whole=False)
        if len(self.tokens) >= self._most:
            return self._end(Finish.LENGTH)
        if not self._pieces:
            return ""
        return self._give(len(self._text) - self._held_back())

    def _end(self, finish: Finish, *, whole: bool = True) -> str:
        self.finish = finish
        if whole:
            text = self._decode(self.tokens)
            if not self._follows or text.startswith(self._text):
                self._text = text
            cut = self._stop_at(everywhere=True)
            if cut >= 0:
                self._text = self._text[:cut]
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _extend(self) -> None:
        before = self._decode(self.tokens[self._shown : self._complete])
        after = self._decode(self.tokens[self._shown :])
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self._text += after[len(before) :]
            self._shown, self._complete = self._complete, len(self.tokens)

    def _stop_at(self, *, everywhere: bool = False) -> int:
        start = 0 if everywhere else max(0, self._given)
        return min((at for at in (self._text.find(one, start) for one in self._stop) if at >= 0), default=-1)

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


log = logging.getLogger(__name__)


class OpenRequest(Protocol):
    """A request of an engine: tokens `made`, and its deadlines."""

    made: int
    prompt_tokens: int
    first_due_at: float
    tpot_s: float


class EngineWork(NamedTuple):
    """The work of an engine, for others' admission. `rows` requests of mean `length` write; `tpot_s` is their shortest.
    `due_at`: of the most urgent token in time; `late_at`: of the most urgent late one. `prompts` are unread: tokens,
    due time and time per output token, the most urgent first. `peak_tokens`: SLINFER eq. 2."""

    rows: int = 0
    length: float = 0.0
    due_at: float = inf
    tpot_s: float = 0.0
    late_at: float = inf
    prompts: Sequence[tuple[int, float, float]] = ()
    taken_up: int = 0
    peak_tokens: int = 0


def work_of(requests: Iterable[OpenRequest], *, now: float, taken_up: int, mean_output: float) -> EngineWork:
    """Return the work of an engine with these requests."""
    rows, total, due_at, tpot_s, late_at, peak = 0, 0, inf, 0.0, inf, 0.0
    prompts: list[tuple[int, float, float]] = []
    for request in requests:
        made, prompt, each_s = request.made, request.prompt_tokens, request.tpot_s
        peak += prompt + (made if made > mean_output else mean_output)
        if not made:
            prompts.append((prompt, request.first_due_at, each_s))
            continue
        rows += 1
        total += prompt + made
        if each_s:
            at = request.first_due_at + made * each_s
            if at < now:
                if at < late_at:
                    late_at = at
            elif at < due_at:
                due_at = at
            if each_s < tpot_s or not tpot_s:
                tpot_s = each_s
    if len(prompts) > 1:
        prompts.sort(key=lambda prompt: prompt[1])
    length = total / rows if rows else 0.0
    return EngineWork(rows, length, due_at, tpot_s, late_at, prompts, taken_up, int(peak))


class EngineTurns(Protocol):
    """The turns of one engine. Used by one thread."""

    @property
    def shared(self) -> bool:
        """True if another library has these devices too. Costs no system call."""

    def begin(self, *, due_at: float, step_s: float, work: Callable[[], EngineWork]) -> None:
        """Wait for a turn and hold it. `due_at`: of the most urgent token; `step_s`: the forecast of the iteration.
        `work` is called once the next library is awake."""

    def end(self) -> None:
        """Release the turn: no step is due now."""

    def publish(self, work: EngineWork) -> None:
        """Show the engine's work to other libraries. Costs no system call."""

    def close(self) -> None:
        """Release the devices: the engine has ended."""


_make: Callable[[], EngineTurns] | None = None


def offer_turns(make: Callable[[], EngineTurns] | None) -> None:
    """Set the maker of turns for each engine of this process; None: no turns."""
    global _make
    _make = make


def new_turns() -> EngineTurns | None:
    """Return turns for one engine; None without an offer."""
    try:
        return _make() if _make is not None else None
    except OSError as error:
        log.warning("this engine computes without turns: %s", error)
        return None
