"""The interface of inference engines, the text of a request, and the turns of engines on shared devices.

The contract of an engine (tests/engine_contract.py):

- Except for rounding, the batch does not affect a request's tokens. At temperature 0 the tokens equal those of the
  model's own `generate`. At other temperatures the tokens depend only on the seed.
- `abort` frees the request's memory before the next step.
- `get_memory().held_bytes` never exceeds the budget of `resize`.
- `sleep` and `wake` do not affect a request's tokens.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import msgspec

from stoker.contexts.inference.options import STRUCTURES, OptionRefused, check_options


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


class Sampling(msgspec.Struct, frozen=True):
    """The options for choosing tokens, as in `CausalLM.complete`."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: tuple[int, int] = (0, 0)
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    json_schema: str = ""
    engine_options: tuple[tuple[str, Any], ...] = ()
    adapter: str = ""
    prompt_logprobs: int = 0

    @property
    def structure(self) -> tuple[str, Any] | None:
        """Name and value of the option that constrains the form of the text, or None."""
        if self.json_schema:
            return "json_schema", self.json_schema
        return next((each for each in self.engine_options if each[0] in STRUCTURES), None)

    def all_end_tokens(self, model_ends: frozenset[int]) -> frozenset[int]:
        stops = frozenset(dict(self.engine_options).get("stop_token_ids", ()))
        return stops if self.structure is None and ("ignore_eos", True) in self.engine_options else model_ends | stops


class GenerationRequest(msgspec.Struct, frozen=True):
    """A prompt and its token deadlines: the first token is due at `due_at` (time.monotonic), later tokens every
    `tpot_s` seconds.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    due_at: float = inf
    tpot_s: float = 0.0
    pieces: bool = False


class TokenLikelihood(msgspec.Struct, frozen=True):
    token: int
    logprob: float


class ScoredPromptToken(msgspec.Struct, frozen=True):
    token: int
    logprob: float | None = None
    likeliest: tuple[TokenLikelihood, ...] = ()


class NewToken(msgspec.Struct, frozen=True):
    """A new token (-1: none) and its text. Only a last token has `finish`; only a first token has `prompt`, the scored
    prompt. `option`: the option that caused the `error`.
    """

    request: int
    token: int
    text: str = ""
    finish: FinishReason | None = None
    logprob: float | None = None
    likeliest: tuple[TokenLikelihood, ...] = ()
    error: str = ""
    option: str = ""
    prompt: tuple[ScoredPromptToken, ...] = ()


class EngineMemory(msgspec.Struct, frozen=True):
    """Bytes of the weights, the current cache, the cache budget (0 = none) and one cached token (0 = unknown).
    `fixed_tokens`: size of a cache that cannot be resized.
    """

    weights_bytes: int
    held_bytes: int
    budget_bytes: int
    token_bytes: int = 0
    fixed_tokens: int = 0


class TokenCache(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a loaded model on each device. `tokens`: tokens in the smallest useful cache, or in a fixed cache."""

    weights_bytes: int = 0
    token_bytes: int = 0
    tokens: int = 0
    is_fixed: bool = False


class EngineLoad(msgspec.Struct, frozen=True):
    """Numbers of running and waiting requests, and totals since the engine started. `row_steps`: sum of batch sizes
    over all decode steps. `rows`: maximum concurrent requests. `cache_tokens`: size of the cache (0: unlimited or
    unknown). `peak_tokens`: cache tokens of all requests at their expected lengths (SLINFER eq. 2).
    """

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
    cache_tokens: int = 0
    peak_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens that the engine took from cached prefixes

    @property
    def is_cache_too_small(self) -> bool:
        return 0 < self.cache_tokens < self.peak_tokens

    def after_step(
        self, *, decoded: int, running: int, prompt_tokens: int, new_tokens: int, busy_s: float, evictions: int = 0
    ) -> EngineLoad:
        return msgspec.structs.replace(
            self, steps=self.steps + 1, decode_steps=self.decode_steps + (decoded > 0),
            row_steps=self.row_steps + decoded, most_running=max(self.most_running, running),
            prompt_tokens=self.prompt_tokens + prompt_tokens, new_tokens=self.new_tokens + new_tokens,
            busy_s=self.busy_s + busy_s, evictions=self.evictions + evictions,
        )  # fmt: skip

    @property
    def mean_rows_per_decode_step(self) -> float:
        return self.row_steps / self.decode_steps if self.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.busy_s if self.busy_s else 0.0


class EngineWork(NamedTuple):
    """A summary of an engine's open requests.

    Decoding requests: `rows` is their number, `length` their mean tokens, `tpot_s` their minimum time per output token,
    `due_at` the earliest due time in the future, and `late_at` the earliest in the past. `answers`: due time, time per
    output token and maximum tokens left of each; empty if no request has a `tpot_s`. `prompts`: tokens, due time, time
    per output token and maximum output tokens of each unread prompt, earliest first.
    """

    rows: int = 0
    length: float = 0.0
    due_at: float = inf
    tpot_s: float = 0.0
    late_at: float = inf
    prompts: Sequence[tuple[int, float, float, int]] = ()
    accepted_requests: int = 0
    peak_tokens: int = 0
    answers: Sequence[tuple[float, float, int]] = ()


def summarize_work(requests: Iterable[Any], *, now: float, accepted_requests: int, mean_output: float) -> EngineWork:
    """Summarize the open requests (`engine_thread.Generation`). `now`: seconds of time.monotonic."""
    rows, total, due_at, tpot_s, late_at, peak = 0, 0, inf, 0.0, inf, 0.0
    prompts: list[tuple[int, float, float, int]] = []
    answers: list[tuple[float, float, int]] = []
    for request in requests:
        made, prompt, each_s = request.made, request.prompt_tokens, request.tpot_s
        peak += prompt + (made if made > mean_output else mean_output)
        if not made:
            prompts.append((prompt, request.first_due_at, each_s, request.most))
            continue
        rows += 1
        total += prompt + made
        at = request.first_due_at + made * each_s
        left = request.most - made
        answers.append((at, each_s, left if left > 0 else 0))
        if each_s:
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
    return EngineWork(
        rows, length, due_at, tpot_s, late_at, prompts, accepted_requests, int(peak), answers if tpot_s else ()
    )


class InferenceEngine(Protocol):
    """One model that serves many requests. One thread calls all methods. `chosen`: why this engine was chosen."""

    name: str
    chosen: str

    def add(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError if the request can never run."""

    def step(self) -> list[NewToken]: ...

    def abort(self, request: int) -> None: ...

    def count_slots(self) -> int:
        """Return the number of requests that can run at the same time within the cache budget."""

    def get_load(self) -> EngineLoad: ...

    def get_memory(self) -> EngineMemory: ...

    def resize(self, cache_bytes: int) -> None:
        """Change the cache budget. Raises ValueError if an open request would not fit into the new cache."""

    def sleep(self) -> None:
        """Free device memory until `wake`. Raises RuntimeError while requests run."""

    def wake(self) -> None: ...

    def stop(self) -> None: ...


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MAX_PARTS = 3  # maximum tokens of an incomplete character, because UTF-8 uses up to 4 bytes per character
Decode = Callable[[list[int]], str]


def check_sampling(sampling: Sampling) -> None:
    if not 0 <= sampling.temperature < inf or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"temperature must be 0 or more and top_p in (0, 1]; they are {sampling.temperature} and {sampling.top_p}"
        )
    fewest = 0 if sampling.prompt_logprobs else 1
    for name, least in (("max_new_tokens", fewest), ("logprobs", 0), ("prompt_logprobs", 0)):
        if type(value := getattr(sampling, name)) is not int or value < least:
            raise ValueError(f"{name} must be a whole number, {least} or more, not {value!r}")
    for stop in sampling.stop:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"a stop text must be a non-empty string, not {stop!r}")
    check_options(sampling.engine_options, json_schema=sampling.json_schema)


class ModelTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The token decoder, the end tokens, the maximum tokens of a text, and the vocabulary size (0 = no limit)."""

    decode: Decode
    ends: frozenset[int]
    longest: int
    vocabulary: int = 0
    grammars: Any = None  # a `token_rules.Grammars`, unless vLLM compiles grammars

    def prepare_sampling(self, sampling: Sampling) -> None:
        """Check the options and compile the grammar in the caller's thread. Raises ValueError."""
        check_sampling(sampling)
        self.check_tokens_in_vocabulary(
            dict(sampling.engine_options).get("logit_bias", ()), "logit_bias", option="logit_bias"
        )
        if self.grammars is not None:
            self.grammars.create_matcher(sampling)

    def check(self, request: GenerationRequest, *, virtual_tokens: int | None = None) -> None:
        """Raise ValueError if the engine cannot serve a request. `virtual_tokens`: tokens of a soft prompt; None if the
        engine supports no adapters.
        """
        sampling = request.sampling
        if sampling.adapter and virtual_tokens is None:
            raise OptionRefused("adapter", "this model's engine does not support adapters; continuous and vllm do")
        self.check_prompt(request.prompt, sampling, virtual_tokens=virtual_tokens or 0)

    def check_prompt(self, prompt: Collection[int], sampling: Sampling, *, virtual_tokens: int = 0) -> None:
        self.prepare_sampling(sampling)
        self.check_tokens_in_vocabulary(prompt, "the prompt")
        self.check_length(virtual_tokens + len(prompt) + sampling.max_new_tokens)

    def check_length(self, length: int, what: str = "the prompt") -> None:
        """Raise ValueError if a prompt and its continuation have too many tokens."""
        if self.longest and length > self.longest:
            told = f"{what} has {length} tokens with its continuation"
            raise ValueError(f"{told}; the model accepts at most {self.longest}. Shorten it, or split it")

    def check_tokens_in_vocabulary(self, tokens: Collection[int], where: str, *, option: str = "") -> None:
        if not self.vocabulary or not tokens or 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            return
        wrong = next(token for token in tokens if not 0 <= token < self.vocabulary)
        why = f"{where} has the token {wrong}; this model's tokens are 0 to {self.vocabulary - 1}"
        raise OptionRefused(option, why) if option else ValueError(why)


class WrittenText:
    """The text that a request has written. Text is returned once its characters are complete, or are surely invalid."""

    def __init__(self, texts: ModelTexts, request: GenerationRequest) -> None:
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self._decode = texts.decode
        self._ends = request.sampling.all_end_tokens(texts.ends)
        self._most = request.sampling.max_new_tokens
        self._stop = request.sampling.stop
        self._decodes_each_token = request.pieces or bool(self._stop)
        self._sends_pieces = request.pieces
        self._text = ""
        self._returned_characters = 0
        self._shown, self._complete = 0, 0
        self._ahead = 0  # number of characters in `_text` that belong to tokens after index `_complete`

    def add(self, token: int, *, is_last: bool = False) -> str:
        """Add a token and return the new text. `is_last`: True if no token can follow."""
        if token in self._ends:
            return self._finish_text(FinishReason.STOP)
        self.tokens.append(token)
        if self._decodes_each_token:
            self._decode_new_characters()
            if self._cut_at_stop_text(start=self._returned_characters):
                return self._finish_text(FinishReason.STOP, whole=False)
        if is_last:
            return self._finish_text(FinishReason.STOP)
        if len(self.tokens) >= self._most:
            return self._finish_text(FinishReason.LENGTH)
        if not self._sends_pieces:
            return ""
        return self._take_text(len(self._text) - self._partial_stop_length())

    def _finish_text(self, finish: FinishReason, *, whole: bool = True) -> str:
        self.finish = finish
        if whole:
            text = self._decode(self.tokens)
            if not self._decodes_each_token or text.startswith(self._text):
                self._text = text
            self._cut_at_stop_text(start=0)
        return self._take_text(len(self._text))

    def _take_text(self, end: int) -> str:
        piece = self._text[self._returned_characters : end]
        self._returned_characters = max(self._returned_characters, end)
        return piece

    def _decode_new_characters(self) -> None:
        before = self._decode(self.tokens[self._shown : self._complete])
        after = self._decode(self.tokens[self._shown :])
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self._text += after[len(before) + self._ahead :]
            self._shown, self._complete, self._ahead = self._complete, len(self.tokens), 0
        elif len(self.tokens) - self._complete > _MAX_PARTS:
            parts = len(after) - len(after.rstrip(_INCOMPLETE))
            invalid = after[len(before) + self._ahead : len(after) - min(parts, _MAX_PARTS)]
            self._text += invalid
            self._ahead += len(invalid)

    def _cut_at_stop_text(self, *, start: int) -> bool:
        found = [at for at in (self._text.find(one, start) for one in self._stop) if at >= 0]
        self._text = self._text[: min(found, default=None)]
        return bool(found)

    def _partial_stop_length(self) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


log = logging.getLogger(__name__)


class EngineTurns(Protocol):
    """Takes turns with other libraries on the same devices: `pilot.library.library_turns.LibraryTurns`."""

    @property
    def shared(self) -> bool: ...

    def begin(self, *, due_at: float, step_s: float, work: Callable[[], EngineWork]) -> float: ...

    def end(self) -> None: ...

    def publish(self, work: EngineWork) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


_create_share: Callable[[], EngineTurns] | None = None


def set_engine_turns_factory(make: Callable[[], EngineTurns] | None) -> None:
    """Set the function that creates the `EngineTurns` of each engine. With None, engines do not take turns."""
    global _create_share
    _create_share = make


def create_engine_turns() -> EngineTurns | None:
    try:
        return _create_share() if _create_share is not None else None
    except OSError as error:
        log.warning("this engine does not take turns with other libraries on its device: %s", error)
        return None
