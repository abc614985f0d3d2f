"""The shape of an inference engine: what a language model context needs of it, and what its contract tests ask.

An engine holds one model on its devices and writes tokens for many requests at once. Requests join and leave between
steps. It is driven by one thread (`engine_thread.py`), so no engine needs locks:

    engine.add(request)                  the request waits; ValueError says why it can never run
    for token in engine.step():          one pass through the model; a request's last token has a `finish`
        ...

The contract (tests/engine_contract.py):

- At temperature 0 a request's tokens are those that the model's own `generate` gives, whatever else is in the batch;
  with a seed they depend on the seed alone. Both up to rounding: two tokens that are equally likely may change places.
- `abort` frees the request's memory before the next step, in which the request has no part, whether its prompt was
  read or not; no other request's tokens change.
- `memory().held_bytes` never exceeds the budget that `resize` has set.
- A request gets the same tokens after `sleep` and `wake` as before.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import msgspec

OWN_OPTIONS = frozenset({"ignore_eos", "stop_token_ids"})
"""Options beyond the common ones that every engine honours."""
VLLM_OPTIONS = OWN_OPTIONS | {
    "json_schema", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
    "min_tokens",
}  # fmt: skip
"""Those that vLLM honours."""


class OptionNotHonoured(ValueError):
    """An engine cannot do what an option of a request asks for. `option` is its name."""

    def __init__(self, option: str) -> None:
        what = "hold a text to a JSON schema" if option == "json_schema" else f"honour {option}"
        super().__init__(f'this engine cannot {what}; causal_lm(engine="vllm") can')
        self.option = option


class Finish(enum.Enum):
    """Why a request has ended."""

    STOP = "stop"
    """The model ended its text, or a stop text came."""
    LENGTH = "length"
    """It has written as many tokens as it was allowed."""


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are chosen: as in `CausalLM.generate`. `logprobs`: log-likelihoods of the chosen token and of this
    number of the likeliest tokens (0 = none). `json_schema`: the text's JSON schema, if the engine supports one.
    `engine_options`: options beyond these by vLLM's names, with their values."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: tuple[int, int] = (0, 0)
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    json_schema: str = ""
    engine_options: tuple[tuple[str, Any], ...] = ()

    def check_honoured(self, honoured: frozenset[str]) -> None:
        """Raise OptionNotHonoured for an option that is not among those that an engine honours."""
        for option in (*(["json_schema"] if self.json_schema else []), *(name for name, _ in self.engine_options)):
            if option not in honoured:
                raise OptionNotHonoured(option)

    def ends(self, ends: frozenset[int]) -> frozenset[int]:
        """The tokens that end this text, where `ends` are those of the model."""
        options = dict(self.engine_options)
        return (frozenset() if options.get("ignore_eos") else ends) | frozenset(options.get("stop_token_ids", ()))


class GenerationRequest(msgspec.Struct, frozen=True):
    """A prompt as token ids (one or more), and how to go on from it. `due_at` (time.monotonic) is when its first token
    is due, `tpot_s` the seconds for each further one; infinity and 0 if nobody waits for them. `pieces`: the text is
    wanted as it comes; else `NewToken.text` is empty but for the last, which has all of it."""

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
    """A token that a step has written. `text` is what it adds to the request's text: empty while characters are not
    complete, or while the text could still become a stop text. With `finish` the request has ended; with an `error`
    as well it has failed, by itself."""

    request: int
    token: int
    text: str = ""
    finish: Finish | None = None
    logprob: float | None = None
    likeliest: tuple[TokenChance, ...] = ()
    error: str = ""


class EngineMemory(msgspec.Struct, frozen=True):
    """Bytes of device memory: what the weights take, what the key-value cache holds now, and its budget (0 = none)."""

    weights_bytes: int
    held_bytes: int
    budget_bytes: int


class EngineLoad(msgspec.Struct, frozen=True):
    """How full the batch is, and was: requests that run and that wait now; steps and tokens since the beginning,
    seconds
    in those steps, the most requests that ran at once, and `row_steps`: the sum over all decode steps of the requests
    in them. `row_steps / decode_steps` is the mean batch."""

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
    """How many requests may run at once; 0 where an engine does not say."""

    @property
    def mean_rows(self) -> float:
        """Requests of a decode step in the mean."""
        return self.row_steps / self.decode_steps if self.decode_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were written a second of work."""
        return self.new_tokens / self.busy_s if self.busy_s else 0.0


class InferenceEngine(Protocol):
    """One model, many requests. All methods are called by one thread."""

    name: str
    """What people call it: `continuous`, `vllm`, `static`."""
    options: frozenset[str]
    """The options of requests beyond the common ones that it honours."""

    def add(self, request: GenerationRequest) -> None:
        """The request joins the batch when there is room. Raises ValueError if it never can."""

    def step(self) -> list[NewToken]:
        """Compute one step; returns the tokens that it has written. Without requests it does nothing."""

    def abort(self, request: int) -> None:
        """The request leaves. No-op if it has ended."""

    def slots(self) -> int:
        """How many requests it serves at once within its budget."""

    def load(self) -> EngineLoad:
        """How full the batch is."""

    def memory(self) -> EngineMemory:
        """What is held of the device's memory."""

    def resize(self, cache_bytes: int) -> None:
        """Change the budget of the key-value cache. Raises ValueError if no request could run with it."""

    def sleep(self) -> None:
        """Free the device's memory as far as the engine can; requests are refused until `wake`. Raises RuntimeError
        while requests run."""

    def wake(self) -> None:
        """Be as before `sleep`."""

    def stop(self) -> None:
        """End: nothing is asked of it any more."""
