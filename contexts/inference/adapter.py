"""The interface of inference engines, the text that requests write, and how engines take turns on shared devices.

One thread calls an engine (`engine_thread`):

    engine.add(request)                  queue a request; raises ValueError if the request can never run
    for token in engine.step():          one forward pass; the last token of a request has a `finish`
        ...

The contract (tests/engine_contract.py):

- Except for rounding, the batch does not affect a request's tokens. At temperature 0 the tokens equal those of the
  model's own `generate`. At other temperatures the tokens depend only on the seed.
- `abort` removes the request and frees its memory before the next step.
- `memory().held_bytes` never exceeds the budget of `resize`.
- `sleep` and `wake` do not affect a request's tokens.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec

from stoker.contexts.inference.engine_work import EngineWork
from stoker.contexts.inference.options import STRUCTURES, OptionRefused, check_options


class Finish(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


class Sampling(msgspec.Struct, frozen=True):
    """The options for choosing tokens, as in `CausalLM.generate` and `CausalLM.complete`."""

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
        """Name and value of the option that constrains the form of the text (such as a JSON schema), or None."""
        if self.json_schema:
            return "json_schema", self.json_schema
        return next((each for each in self.engine_options if each[0] in STRUCTURES), None)

    def ends(self, ends: frozenset[int]) -> frozenset[int]:
        stops = frozenset(dict(self.engine_options).get("stop_token_ids", ()))
        return stops if self.structure is None and ("ignore_eos", True) in self.engine_options else ends | stops


class GenerationRequest(msgspec.Struct, frozen=True):
    """A prompt as token ids, and the options for its continuation.

    The first token is due at `due_at` (time.monotonic), and each later token `tpot_s` seconds after its predecessor.
    Without `pieces`, only the last `NewToken` has text.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    due_at: float = float("inf")
    tpot_s: float = 0.0
    pieces: bool = False


class TokenChance(msgspec.Struct, frozen=True):
    token: int
    logprob: float


class PromptToken(msgspec.Struct, frozen=True):
    """A token of a prompt. `logprob` is None for the first token."""

    token: int
    logprob: float | None = None
    likeliest: tuple[TokenChance, ...] = ()


class NewToken(msgspec.Struct, frozen=True):
    """A token that an engine step writes (-1: no token), and the text that the token adds. `finish`: why the request
    ended. `error`, `option`: why the request failed, and the option that caused the failure. `prompt`: tokens of the
    scored prompt, with the request's first token.
    """

    request: int
    token: int
    text: str = ""
    finish: Finish | None = None
    logprob: float | None = None
    likeliest: tuple[TokenChance, ...] = ()
    error: str = ""
    option: str = ""
    prompt: tuple[PromptToken, ...] = ()


class EngineMemory(msgspec.Struct, frozen=True):
    """Bytes of weights, current cache, cache budget (0 = no budget), and one cached token (0 = unknown).

    `fixed_tokens`: size in tokens of a cache that `resize` cannot change; 0 if `resize` can change the cache.
    """

    weights_bytes: int
    held_bytes: int
    budget_bytes: int
    token_bytes: int = 0
    fixed_tokens: int = 0


class TokenCache(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a loaded model on each device. `weights_bytes`: weights and process. `token_bytes`: one cached token.

    `tokens`: size of the smallest useful cache in tokens. If `is_fixed`, size of the whole cache, which cannot be
    resized.
    """

    weights_bytes: int = 0
    token_bytes: int = 0
    tokens: int = 0
    is_fixed: bool = False


class EngineLoad(msgspec.Struct, frozen=True):
    """Numbers of running and waiting requests, and totals since the engine started. `row_steps`: sum of batch sizes
    over all decode steps.

    `cache_tokens`: size of the cache (0: unlimited or unknown). `peak_tokens`: cache tokens of all requests at their
    expected lengths (SLINFER eq. 2); can exceed the cache if requests outgrow their estimates.
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
    """Maximum number of concurrent requests; 0 if unknown."""
    cache_tokens: int = 0
    peak_tokens: int = 0
    reused_tokens: int = 0
    """Number of prompt tokens that were not read, because a kept prefix contained them."""

    @property
    def is_cache_too_small(self) -> bool:
        return 0 < self.cache_tokens < self.peak_tokens

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
    def mean_rows_per_decode_step(self) -> float:
        return self.row_steps / self.decode_steps if self.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.busy_s if self.busy_s else 0.0


class InferenceEngine(Protocol):
    """One model that serves many requests. One thread calls all methods."""

    name: str
    chosen: str
    """Reason for the choice of this engine, as text."""

    def add(self, request: GenerationRequest) -> None:
        """Add a request. Raises ValueError if the request can never run."""

    def step(self) -> list[NewToken]:
        """Compute one step and return its tokens. Without requests, do nothing."""

    def abort(self, request: int) -> None:
        """Remove the request if it has not ended."""

    def slots(self) -> int:
        """Return the number of requests that can run at the same time within the cache budget."""

    def load(self) -> EngineLoad:
        """Return the numbers of running and waiting requests, and totals since the engine started."""

    def memory(self) -> EngineMemory:
        """Return the device memory that the engine uses."""

    def resize(self, cache_bytes: int) -> None:
        """Change the cache budget. Raises ValueError if an open request would no longer fit into the cache."""

    def sleep(self) -> None:
        """Free device memory until `wake`. Raises RuntimeError while requests run."""

    def wake(self) -> None:
        """Make the engine ready for requests again after `sleep`."""

    def stop(self) -> None:
        """Stop the engine. No other call may follow."""


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 3
"""Maximum tokens, and maximum replacement characters, of an incomplete character: UTF-8 uses up to four bytes."""
Decode = Callable[[list[int]], str]


def check_sampling(sampling: Sampling) -> None:
    if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"temperature must be 0 or more and top_p in (0, 1]; they are {sampling.temperature} and {sampling.top_p}"
        )
    fewest = 0 if sampling.prompt_logprobs else 1
    for name, least in (("max_new_tokens", fewest), ("logprobs", 0), ("prompt_logprobs", 0)):
        if type(value := getattr(sampling, name)) is not int or value < least:
            raise ValueError(f"{name} must be a whole number, {least} or more, not {value!r}")
    for stop in sampling.stop:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"a stop text must be a text that is not empty, not {stop!r}")
    check_options(sampling.engine_options, json_schema=sampling.json_schema)


class Matcher(Protocol):
    """A position in a compiled grammar (`llguidance.LLMatcher`)."""

    def consume_token(self, sampled_token: int) -> bool:
        """Advance the position by one token. Return False if the grammar does not allow the token."""

    def compute_bitmask(self) -> bytes:
        """Return one bit per token, lowest bits first. A set bit means that the token may follow."""

    def is_error(self) -> bool:
        """Return True if a work limit was exceeded, or a token was not allowed."""

    def get_error(self) -> str:
        """Return the error message."""

    def is_stopped(self) -> bool:
        """Return True if the text is complete and no token can follow."""


class GrammarSource(Protocol):
    def matcher(self, sampling: Sampling) -> Matcher | None:
        """Return a matcher at the start of the text, or None if the options have no grammar. Raises OptionRefused."""


class ModelTexts:
    """The decoder of tokens, the end tokens, and the model's maximum tokens and vocabulary size (0 = no limit)."""

    def __init__(
        self, *, decode: Decode, ends: frozenset[int], longest: int, vocabulary: int = 0,
        grammars: GrammarSource | None = None,
    ) -> None:  # fmt: skip
        self.decode = decode
        self.ends = ends
        self.longest = longest
        self.vocabulary = vocabulary
        self.grammars = grammars

    def prepare(self, sampling: Sampling) -> None:
        """Check the options and compile the grammar. The caller's thread does this, so that the engine does not wait.

        Raises ValueError for an invalid option.
        """
        check_sampling(sampling)
        self.check_tokens_in_vocabulary(
            dict(sampling.engine_options).get("logit_bias", ()), "logit_bias", option="logit_bias"
        )
        if self.grammars is not None:
            self.grammars.matcher(sampling)

    def check(self, request: GenerationRequest, *, virtual_tokens: int | None = None) -> None:
        """Raise ValueError for a request that the engine cannot serve. `virtual_tokens`: length of the request's soft
        prompt; None if the engine does not support adapters.
        """
        sampling = request.sampling
        if sampling.adapter and virtual_tokens is None:
            raise OptionRefused("adapter", "this model's engine does not support adapters; continuous and vllm do")
        self.prepare(sampling)
        self.check_tokens_in_vocabulary(request.prompt, "the prompt")
        length = (virtual_tokens or 0) + len(request.prompt) + sampling.max_new_tokens
        if self.longest and length > self.longest:
            raise ValueError(
                f"the prompt has {length} tokens with its continuation; the model accepts at most {self.longest}."
                " Shorten it, or split it"
            )

    def check_tokens_in_vocabulary(self, tokens: Collection[int], where: str, *, option: str = "") -> None:
        if not self.vocabulary or not tokens or 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            return
        wrong = next(token for token in tokens if not 0 <= token < self.vocabulary)
        why = f"{where} has the token {wrong}; this model's tokens are 0 to {self.vocabulary - 1}"
        raise OptionRefused(option, why) if option else ValueError(why)

    def begin(self, request: GenerationRequest) -> Written:
        sampling = request.sampling
        return Written(
            decode=self.decode, ends=sampling.ends(self.ends), most=sampling.max_new_tokens, stop=sampling.stop,
            pieces=request.pieces,
        )  # fmt: skip


class Written:
    """The written text of one request. A piece of text is returned when its characters are complete, or can no longer
    become complete.
    """

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
        self._ahead = 0
        """Number of characters of `_text` that come from tokens after index `_complete`."""

    def add(self, token: int, *, is_last: bool = False) -> str:
        """Add a token and return the new text. `is_last`: True if no token can follow."""
        if token in self._ends:
            return self._end(Finish.STOP)
        self.tokens.append(token)
        if self._follows:
            self._extend()
            cut = self._find_stop_text()
            if cut >= 0:
                self._text = self._text[:cut]
                return self._end(Finish.STOP, whole=False)
        if is_last:
            return self._end(Finish.STOP)
        if len(self.tokens) >= self._most:
            return self._end(Finish.LENGTH)
        if not self._pieces:
            return ""
        return self._give(len(self._text) - self._partial_stop_length())

    def _end(self, finish: Finish, *, whole: bool = True) -> str:
        self.finish = finish
        if whole:
            text = self._decode(self.tokens)
            if not self._follows or text.startswith(self._text):
                self._text = text
            cut = self._find_stop_text(everywhere=True)
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
            self._text += after[len(before) + self._ahead :]
            self._shown, self._complete, self._ahead = self._complete, len(self.tokens), 0
        elif len(self.tokens) - self._complete > _MOST_PARTS:
            parts = len(after) - len(after.rstrip(_INCOMPLETE))
            invalid = after[len(before) + self._ahead : len(after) - min(parts, _MOST_PARTS)]
            self._text += invalid
            self._ahead += len(invalid)

    def _find_stop_text(self, *, everywhere: bool = False) -> int:
        start = 0 if everywhere else max(0, self._given)
        return min((at for at in (self._text.find(one, start) for one in self._stop) if at >= 0), default=-1)

    def _partial_stop_length(self) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


log = logging.getLogger(__name__)


class DeviceShare(Protocol):
    """Takes turns with other libraries that use the same devices. One thread calls all methods."""

    @property
    def shared(self) -> bool:
        """True if another library also uses these devices. The check makes no system call."""

    def begin(self, *, due_at: float, step_s: float, work: Callable[[], EngineWork]) -> None:
        """Wait for a turn on the devices.

        `due_at`: earliest due time of a token. `step_s`: expected seconds of the step. `work`: returns the engine's
        open work, and is called after the next library was woken.
        """

    def end(self) -> None:
        """End the engine's turn, because the engine has no step to compute."""

    def publish(self, work: EngineWork) -> None:
        """Publish the engine's open work to other libraries, without a system call."""

    def leave(self) -> None:
        """Release the devices until the next `begin`."""

    def close(self) -> None:
        """Release the devices when the engine ends."""


_make: Callable[[], DeviceShare] | None = None


def set_device_share_factory(make: Callable[[], DeviceShare] | None) -> None:
    """Set the function that creates the DeviceShare of each engine. With None, engines do not take turns."""
    global _make
    _make = make


def create_device_share() -> DeviceShare | None:
    try:
        return _make() if _make is not None else None
    except OSError as error:
        log.warning("this engine computes without turns: %s", error)
        return None
