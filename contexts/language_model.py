"""A causal language model as a context.

The engine (`inference/`) writes the texts of all slots in one batch, which affects results only by rounding. The engine
computes label scores between two steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec
import torch

from stoker.contexts import ambient
from stoker.contexts.adapter_files import soft_prompt_length
from stoker.contexts.forward import ModelRunner
from stoker.contexts.inference.adapter import EngineLoad, EngineMemory, Sampling, TokenCache
from stoker.contexts.inference.core_share import compute_context_for_device
from stoker.contexts.inference.engine_thread import EngineThread
from stoker.contexts.inference.options import OptionRefused
from stoker.contexts.inference.profiling import EngineProfiler, StepCollector
from stoker.contexts.inference.static import (
    LEAST_CACHE_BYTES,
    PREFIX_LIMIT_BYTES,
    PROCESS_BYTES,
    build_inference_engine,
)
from stoker.contexts.inference.token_rules import Grammars
from stoker.contexts.model_source import UNDECLARED_CACHE_TOKENS
from stoker.contexts.prompts import PromptReader, find_end_tokens, max_positions
from stoker.contexts.step_times import StepProfile, StepTimes
from stoker.contexts.text_writer import Completion, CompletionStream, Prompt, TextWriter
from stoker.errors import StokerError
from stoker.units import show_bytes

if TYPE_CHECKING:
    from stoker.contexts.inference.vllm_engine import VLLMEngine

_PROMPTS_SCORED_AT_ONCE = 8
"""Number of prompts scored between two steps of the batch."""


class CompletionOptions(TypedDict, total=False):
    """Options of `CausalLM.complete`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: Sequence[str]
    logprobs: int
    json_schema: str
    engine_options: Mapping[str, Any] | None
    adapter: str
    prompt_logprobs: int


def _build_sampling(
    *, seed: int = 0, stop: Sequence[str] = (), engine_options: Mapping[str, Any] | None = None, **options: Any
) -> Sampling:
    return Sampling(seed=(seed, 0), stop=tuple(stop), engine_options=tuple((engine_options or {}).items()), **options)


class CausalLM:
    """A language model and its tokenizer. Made by `load_causal_lm`. Concurrent calls in the library share one batch."""

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str = "", origin: str = "", engine: str | VLLMEngine = "auto",
        cache_bytes: int = 0, graphs: bool = False, longest: int = 0, adapters: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        """The Transformers model; None with vLLM. The engine ignores later changes of the weights."""
        self.tokenizer = tokenizer
        self.name, self.origin = name, origin
        self.adapters = dict(adapters or {})
        """Folders of PEFT adapters by name."""
        self._runner: ModelRunner | None = None
        self._vllm_engine: VLLMEngine | None = None
        self._steps = StepCollector()
        if isinstance(engine, str):
            configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
            longest = longest or max_positions(model.config)
            ends, vocabulary = find_end_tokens(configured, tokenizer), int(getattr(model.config, "vocab_size", 0) or 0)
            self._prompts = PromptReader(
                tokenizer, ends=ends, longest=longest, vocabulary=vocabulary, grammars=Grammars(tokenizer, ends=ends)
            )
            self._runner = ModelRunner(model, limit_bytes=PREFIX_LIMIT_BYTES)
            make = partial(
                build_inference_engine, self._runner, self._prompts.texts, engine=engine, cache_bytes=cache_bytes,
                step_hook=self._steps.record_step, graphs=graphs, adapters=self.adapters,
            )  # fmt: skip
            self._thread = EngineThread(
                make, computing=compute_context_for_device(str(self._runner.device)), stepped=self._steps.add_step
            )
            if engine != "auto":
                _ = self._thread.engine  # raises an error now if the model does not support the engine
        else:
            self._prompts, self._vllm_engine = engine.prompts, engine
            self._thread = EngineThread(lambda: engine, computing=compute_context_for_device(engine.device))
        self._texts = TextWriter(self._thread, self._prompts)
        # The engine thread stops when its writer is garbage-collected; an open stream keeps the writer alive. At
        # interpreter exit, the thread stops itself.
        weakref.finalize(self._texts, self._thread.close, wait=False).atexit = False

    @property
    def device(self) -> str:
        """PyTorch name of the model's device: `cpu` or `cuda:0`."""
        return self._vllm_engine.device if self._vllm_engine is not None else str(self._model_runner().device)

    @property
    def longest(self) -> int:
        """Maximum tokens of a prompt and its continuation; 0 if unknown."""
        return self._prompts.texts.longest

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self._thread.engine.name

    @property
    def engine_chosen(self) -> str:
        """Reason for the choice of the engine."""
        return self._thread.engine.chosen

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens that the engine took from cached prefixes."""
        return (
            self._vllm_engine.reused_tokens
            if self._vllm_engine is not None
            else self._model_runner().prefixes.reused_tokens
        )

    def slots(self, device_memory_bytes: int = 0) -> int:
        """Return the number of concurrent calls.

        Args:
            device_memory_bytes: Limit of device memory; 0: no limit.
        """
        with self._thread.alone():
            if device_memory_bytes:
                self._limit_memory(device_memory_bytes, accepted=True)
            return self._thread.engine.count_slots()

    def resize(self, *, device_memory_bytes: int) -> None:
        """Limit the device memory of the model and its cache. Raises ValueError if the weights do not fit.

        Args:
            device_memory_bytes: Limit in bytes, including weights.
        """
        with self._thread.alone():
            self._limit_memory(device_memory_bytes)

    def _limit_memory(self, device_memory_bytes: int, *, accepted: bool = False) -> None:
        if self._vllm_engine is not None and device_memory_bytes >= self._vllm_engine.started_bytes > 0:
            return  # vLLM reserved its memory at the start, and the limit allows this memory
        weights = self._thread.engine.get_memory().weights_bytes
        room = device_memory_bytes - weights - PROCESS_BYTES
        if accepted or device_memory_bytes >= ambient.device_memory_bytes() > 0:
            room = max(room, LEAST_CACHE_BYTES)
        if room <= 0:
            told = f"the model takes {show_bytes(weights)} and its process {show_bytes(PROCESS_BYTES)}"
            raise ValueError(f"{told}; with {show_bytes(device_memory_bytes)} no memory is left for texts")
        self._thread.engine.resize(room)

    def batch_load(self) -> EngineLoad:
        """Return the numbers of running and waiting requests, and totals since the engine started."""
        return msgspec.structs.replace(self._thread.get_load(), reused_tokens=self.reused_tokens)

    def take_step_times(self, *, urgent: bool = False) -> StepTimes:
        """Return the step times measured since the last call of this method.

        Args:
            urgent: Return only the times of a profiler.
        """
        return self._steps.take_times() if self._steps.urgent or not urgent else StepTimes()

    def wait_until_times_taken(self, *, timeout_s: float) -> bool:
        """Return True once `take_step_times` has returned a profiler's times; False after a timeout.

        Args:
            timeout_s: Maximum seconds to wait.
        """
        return self._steps.wait_until_taken(timeout_s=timeout_s)

    def profile(self, *, quick: bool = False, told: Callable[[float, float], None] | None = None) -> StepProfile:
        """Return the engine's measured step times. Raises RuntimeError while requests run.

        Args:
            quick: Take fewer samples.
            told: Receives the finished share, and the total 1.0.
        """
        with self._thread.alone():
            engine, load = self._thread.engine, self._thread.get_load()
            if load.running or load.waiting:
                raise RuntimeError(
                    f"{load.running + load.waiting} requests are running; profile the model after they end"
                )
            words = len(self.tokenizer)
            profiler = EngineProfiler(engine, vocabulary=words, longest=self.longest, quick=quick, told=told)
            self._steps.paused = True
            try:
                found = profiler.measure()
            finally:
                self._steps.paused = False
            self._steps.replace_known_times(found.times)
        return msgspec.structs.replace(found, device=self.device)

    def memory(self) -> EngineMemory:
        """Return the memory that the weights and the cache occupy on the device."""
        with self._thread.alone():
            return self._thread.engine.get_memory()

    def token_cache(self) -> TokenCache | None:
        """Return the memory that weights and a cached token need per device; None if unknown."""
        memory, declared = self.memory(), ambient.device_memory_bytes()
        if not memory.token_bytes:
            return None
        least = min(self.longest or UNDECLARED_CACHE_TOKENS, UNDECLARED_CACHE_TOKENS)
        weights, fixed = memory.weights_bytes + PROCESS_BYTES, memory.fixed_tokens
        if declared:  # the engine keeps at least a small cache within this memory (see `_limit_memory`)
            weights = min(weights, max(memory.weights_bytes, declared - LEAST_CACHE_BYTES))
        return TokenCache(weights, memory.token_bytes, fixed or least, is_fixed=fixed > 0)

    def sleep(self) -> None:
        """Free device memory and refuse requests until `wake`. Raises RuntimeError while requests run."""
        self._thread.sleep()

    def wake(self) -> None:
        """Accept requests again after `sleep`."""
        self._thread.wake()

    def close(self) -> None:
        """Stop the engine for good."""
        self._thread.close()

    # ---- prompts

    def chat(self, message: str, *, system: str = "") -> str:
        """Return the prompt of one question in the model's chat format.

        Args:
            message: The user's message.
            system: The system message.
        """
        ahead = [{"role": "system", "content": system}] if system else []
        return self.chat_prompt([*ahead, {"role": "user", "content": message}])

    @property
    def chat_template(self) -> str:
        """Text of all Jinja templates of the chat format; empty without a chat format."""
        found = getattr(self.tokenizer, "chat_template", None) or ""
        return "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found)

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Return the prompt of a conversation. Without a chat format, join the messages' contents.

        Args:
            messages: Messages with `role`, `content` and other fields of the format.
            options: Values for the format, for example `tools`.
        """
        if not self.chat_template:
            return "\n\n".join(message["content"] for message in messages)
        return str(
            self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
        )

    def virtual_tokens(self, adapter: str) -> int:
        """Return the length of an adapter's soft prompt; 0 for a LoRA. Raises ValueError for an unsuitable adapter.

        Args:
            adapter: Name of one of `adapters`.
        """
        try:
            return soft_prompt_length(self.adapters[adapter])
        except ValueError as error:
            raise OptionRefused("adapter", f"the adapter {adapter} cannot be served: {error}") from None

    def count_tokens(self, text: Prompt) -> int:
        """Return the number of tokens in a prompt.

        Args:
            text: The prompt, or its token ids.
        """
        return len(self._prompts.encode([text])[0]) if isinstance(text, str) else len(text)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens.

        Args:
            tokens: The token ids.
        """
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    @contextlib.contextmanager
    def alone(self) -> Iterator[ModelRunner]:
        """Yield the runner of the Transformers model, reserved for this thread.

        Raises:
            StokerError: vLLM serves the model.
        """
        runner = self._model_runner()
        with self._thread.alone(), torch.inference_mode():
            yield runner

    def forget_prefixes(self) -> None:
        """Drop all cached prefixes."""
        with self._thread.alone():
            if self._vllm_engine is not None:
                self._vllm_engine.forget_prefixes()
            else:
                self._model_runner().prefixes.clear()

    def _model_runner(self) -> ModelRunner:
        if self._runner is None:
            what = f"{self.engine} serves {self.name or 'this model'}, without a Transformers model"
            raise StokerError(f'{what}; code that reads or tunes it needs causal_lm(..., engine="transformers")')
        return self._runner

    # ---- texts

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 64,
        batch_size: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        prefix: str = "",
        json_schema: str = "",
        engine_options: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> list[str]:
        """Return the continuation of each prompt, without special tokens.

        A text ends at the model's end token, before one of the `stop` texts, or at `max_new_tokens`.

        Args:
            prompts: The texts to continue.
            max_new_tokens: Maximum tokens of each continuation.
            batch_size: Maximum prompts of this call in the batch; 0: the engine decides.
            temperature: 0 selects the likeliest token each time.
            top_p: Draw from the likeliest tokens with this total probability.
            seed: One seed, combined with the prompt's index, or a list with a seed per prompt.
            stop: Texts before which a continuation ends.
            prefix: Text that is inserted before every prompt.
            json_schema, engine_options, adapter: As in `complete`.

        Raises:
            ValueError: A prompt is empty or too long.
        """
        sampling = _build_sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, stop=stop, json_schema=json_schema,
            engine_options=engine_options, adapter=adapter,
        )  # fmt: skip
        return self._texts.generate(prompts, sampling, seed=seed, batch_size=batch_size, prefix=prefix)

    def stream(self, prompt: str, **options: Unpack[CompletionOptions]) -> Iterator[str]:
        """Yield the continuation of a prompt in pieces while it is written. Closing the iterator ends the request.

        Args:
            prompt: The text to continue.
            **options: Options of `complete`.

        Raises:
            ValueError: As in `generate`, immediately.
        """
        return self._texts.stream_text(prompt, _build_sampling(**options))

    def complete(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        json_schema: str = "",
        engine_options: Mapping[str, Any] | None = None,
        adapter: str = "",
        prompt_logprobs: int = 0,
    ) -> Completion:
        """Return the continuation of a prompt with its tokens and the reason for its end.

        Args:
            prompt: The text to continue, or its token ids.
            max_new_tokens, temperature, top_p, seed, stop: As in `generate`. `prompt_logprobs` allows 0 new tokens.
            logprobs: Number of likeliest tokens to return per token.
            json_schema: JSON schema that the text follows, unless `max_new_tokens` cuts the text.
            engine_options: Options by vLLM's names: `regex`, `choice` (texts) or `grammar` (Lark or GBNF) for the form
                of the text; `top_k`, `min_p`, `repetition_penalty`, `frequency_penalty`, `presence_penalty`,
                `logit_bias`, `min_tokens`, `ignore_eos` and `stop_token_ids`.
            adapter: Name of one of `adapters`; empty: the base model.
            prompt_logprobs: Number of likeliest tokens to return per prompt token after the first.

        Raises:
            ValueError: As in `generate`, or an option is invalid.
        """
        return self._texts.complete(prompt, _build_sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stop,
            logprobs=logprobs, json_schema=json_schema, engine_options=engine_options, adapter=adapter,
            prompt_logprobs=prompt_logprobs,
        ))  # fmt: skip

    def stream_completion(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> CompletionStream:
        """Return the tokens of `complete` while they are written. Closing the iterator ends the request.

        Args:
            prompt, options: As in `complete`.

        Raises:
            ValueError: As in `complete`, immediately or before the first token.
        """
        return self._texts.stream_tokens(prompt, _build_sampling(**options))

    # ---- scores of labels

    def label_scores(
        self, prompts: Sequence[str], labels: Sequence[str], *, batch_size: int = 1, prefix: str = ""
    ) -> list[list[float]]:
        """Return the log-likelihood of each label after each prompt, `[prompts][labels]`.

        Args:
            prompts: The texts before the labels.
            labels: Continuations of a prompt. Most labels begin with a space.
            batch_size: Prompts per batch.
            prefix: Text that is inserted before every prompt.

        Raises:
            ValueError: A prompt or label is empty or too long.
        """
        rows = self._prompts.encode_prompts(prompts, prefix=prefix, batch_size=batch_size)
        if not labels or not all(labels):
            raise ValueError(f"label_scores needs labels, none of them empty; it got {list(labels)!r}")
        tails = self._prompts.label_tokens([prefix + prompt for prompt in prompts], rows, labels)
        for place, (row, tail) in enumerate(zip(rows, tails, strict=True)):
            self._prompts.texts.check_length(len(row) + max(map(len, tail)), f"prompt {place}")
        ahead = self._prompts.encode([prefix])[0] if prefix else ()
        scores: list[list[float]] = []
        most, check = max(batch_size, _PROMPTS_SCORED_AT_ONCE), ambient.current_stop_request().raise_if_requested
        score = partial(
            (self._vllm_engine or self._model_runner()).score, prefix=ahead, batch_size=batch_size, check=check
        )
        for start in range(0, len(rows), most):  # between two groups, the engine computes a step for other calls
            scores += self._thread.run(partial(score, rows[start : start + most], tails[start : start + most]))
        return scores
