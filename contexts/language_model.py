"""A causal language model as a context: `generate`, `stream`, `complete` and `label_scores`; and how a library loads
it.

Calls of all slots are written in one batch by the model's engine (`inference/`). Label scores are read between two
steps of the batch, the prompt once for all labels. Results do not depend on the batch, beyond rounding; random draws
are seeded by the prompt's place in the call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from stoker.contexts import ambient
from stoker.contexts.forward import ModelRunner, RunnerScorer, TailScorer
from stoker.contexts.inference.adapter import EngineLoad, EngineMemory, InferenceEngine, Sampling
from stoker.contexts.inference.core_share import computing_on
from stoker.contexts.inference.engine_thread import EngineThread
from stoker.contexts.inference.profiling import EngineProfiler, StepCollector
from stoker.contexts.inference.static import LEAST_CACHE_BYTES, PREFIX_LIMIT_BYTES, PROCESS_BYTES, own_engine
from stoker.contexts.prompts import PromptReader, end_tokens
from stoker.contexts.snapshot import load_parts
from stoker.contexts.step_times import StepProfile, StepTimes
from stoker.contexts.streamed_model import be_quiet, dtype_of
from stoker.contexts.text_writer import Completion, CompletionToken, TextWriter
from stoker.errors import StokerError
from stoker.units import show_bytes, show_seconds

_SCORED_AT_ONCE = 8
"""Prompts whose labels are scored between two steps of the batch."""


class ServingEngine(InferenceEngine, TailScorer, Protocol):
    """An engine with its own weights that scores labels too: vLLM."""

    prompts: PromptReader

    device: str
    reused_tokens: int
    started_bytes: int
    """The device memory within which it was started; 0 if none was declared."""

    def forget_prefixes(self) -> None:
        """Drop kept prefixes of earlier prompts."""


class CausalLM:
    """A language model and its tokenizer. Made by `load_causal_lm`. Calls of several slots join one batch."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "",
        origin: str = "",
        engine: str | ServingEngine = "auto",
        cache_bytes: int = 0,
        graphs: bool = False,
    ) -> None:
        self.model = model
        """None if the engine has its own. The engine ignores later changes of its weights."""
        self.tokenizer = tokenizer
        self.name = name
        self.origin = origin
        self._runner: ModelRunner | None = None
        self._own: ServingEngine | None = None

        self._scorer: TailScorer
        self._steps = StepCollector()
        if isinstance(engine, str):
            configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
            longest = int(getattr(model.config, "max_position_embeddings", 0) or 0)
            self._prompts = PromptReader(tokenizer, ends=end_tokens(configured, tokenizer), longest=longest)
            self._runner = ModelRunner(model, limit_bytes=PREFIX_LIMIT_BYTES)
            self._scorer = RunnerScorer(self._runner)
            make = partial(
                own_engine, self._runner, self._prompts.texts(), engine=engine, cache_bytes=cache_bytes,
                took=self._steps.took, graphs=graphs,
            )  # fmt: skip
            self._thread = EngineThread(make, computing=computing_on(str(self._runner.device)))
            if engine != "auto":
                _ = self._thread.engine  # one that the model cannot have is refused now
        else:
            self._prompts, self._scorer, self._own = engine.prompts, engine, engine
            self._thread = EngineThread(lambda: engine, computing=computing_on(engine.device))
        self._texts = TextWriter(self._thread, self._prompts)
        # The engine ends with its writer, which a stream that is still read holds too. At the program's exit the thread
        # has its own way to end.
        weakref.finalize(self._texts, self._thread.close, wait=False).atexit = False

    @property
    def device(self) -> str:
        """The model's device: `cpu`, `cuda:0`."""
        return self._own.device if self._runner is None and self._own else str(self._model_runner().device)

    @property
    def longest(self) -> int:
        """Most tokens that it reads and writes; 0 if unknown."""
        return self._prompts.longest

    @property
    def engine(self) -> str:
        """The name of the engine that writes."""
        return self._thread.engine.name

    @property
    def engine_chosen(self) -> str:
        """Why this engine writes, for people."""
        return self._thread.engine.chosen

    @property
    def reused_tokens(self) -> int:
        """Tokens that kept prefixes have saved so far."""
        return self._own.reused_tokens if self._own is not None else self._model_runner().prefixes.reused_tokens

    def slots(self, device_memory_bytes: int = 0) -> int:
        """Return how many calls fit a device memory.

        Args:
            device_memory_bytes: 0 is no limit.
        """
        with self._thread.hold() as engine:
            if device_memory_bytes:
                self._limit(engine, device_memory_bytes, accepted=True)
            return engine.slots()

    def resize(self, *, device_memory_bytes: int) -> None:
        """Limit the device memory of the model and its cache.

        Args:
            device_memory_bytes: The limit, weights included.

        Raises:
            ValueError: The weights do not fit.
        """
        with self._thread.hold() as engine:
            self._limit(engine, device_memory_bytes)

    def _limit(self, engine: InferenceEngine, device_memory_bytes: int, *, accepted: bool = False) -> None:
        if self._own is not None and device_memory_bytes >= self._own.started_bytes > 0:
            return  # it was started within that
        weights = engine.memory().weights_bytes
        room = device_memory_bytes - weights - PROCESS_BYTES
        if accepted or device_memory_bytes >= ambient.device_memory_bytes() > 0:
            room = max(room, LEAST_CACHE_BYTES)
        if room <= 0:
            raise ValueError(
                f"the model takes {show_bytes(weights)} and its process {show_bytes(PROCESS_BYTES)}; with"
                f" {show_bytes(device_memory_bytes)} nothing is left for texts"
            )
        engine.resize(room)

    def batch_load(self) -> EngineLoad:
        """Return how full the engine's batch is and was."""
        return self._thread.load()

    def take_step_times(self, *, urgent: bool = False) -> StepTimes:
        """Return the step times since the last call.

        Args:
            urgent: Only a profiler's.
        """
        return self._steps.take() if self._steps.urgent or not urgent else StepTimes()

    def times_are_taken(self, *, timeout_s: float) -> bool:
        """Wait until a profiler's times were taken (`take_step_times`).

        Args:
            timeout_s: Seconds to wait.

        Returns:
            False on timeout.
        """
        return self._steps.taken(timeout_s=timeout_s)

    def profile(self, *, quick: bool = False, told: Callable[[float, float], None] | None = None) -> StepProfile:
        """Measure the engine's step times.

        Args:
            quick: Take fewer samples.
            told: Gets the share that is done, and 1.0.

        Returns:
            The times, with the device.

        Raises:
            RuntimeError: Requests run.
        """
        with self._thread.hold() as engine:
            load = engine.load()
            if load.running or load.waiting:
                raise RuntimeError(f"{load.running + load.waiting} requests run; the model cannot be profiled")
            vocabulary = len(self.tokenizer)
            self._steps.paused = True
            try:
                profiler = EngineProfiler(
                    engine, vocabulary=vocabulary, longest=self._prompts.longest, quick=quick, told=told
                )
                found = profiler.measure()
            finally:
                self._steps.paused = False
            self._steps.profiled(found.times)
        return msgspec.structs.replace(found, device=self.device)

    def memory(self) -> EngineMemory:
        """Return the device memory of the model and its cache."""
        with self._thread.hold() as engine:
            return engine.memory()

    def sleep(self) -> None:
        """Free device memory; requests are refused until `wake`. Raises RuntimeError while requests run."""
        with self._thread.hold() as engine:
            engine.sleep()

    def wake(self) -> None:
        """Be as before `sleep`."""
        with self._thread.hold() as engine:
            engine.wake()

    def close(self) -> None:
        """End the engine; later requests are refused."""
        self._thread.close()

    # ---- prompts

    def chat(self, message: str, *, system: str = "") -> str:
        """Return the prompt of one question in the model's chat format.

        Args:
            message: The user's text.
            system: The system's text before it.
        """
        turns = [{"role": "user", "content": message}]
        if system:
            turns.insert(0, {"role": "system", "content": system})
        return self.chat_prompt(turns)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the prompt of a conversation in the model's chat format. Without a format the contents are joined by
        blank lines.

        Args:
            messages: Each with a `role` and a `content`, the oldest first.
        """
        return self._prompts.chat_prompt(messages)

    def count_tokens(self, text: str) -> int:
        """Return the length of a prompt in tokens.

        Args:
            text: The prompt.
        """
        return len(self._prompts.encode([text])[0])

    @contextlib.contextmanager
    def alone(self) -> Iterator[ModelRunner]:
        """Give the block the model alone, without gradients.

        Yields:
            The runner of the Transformers model.

        Raises:
            StokerError: vLLM serves the model.
        """
        runner = self._model_runner()
        with self._thread.alone(), torch.inference_mode():
            yield runner

    def forget_prefixes(self) -> None:
        """Drop kept prefixes of earlier prompts."""
        with self._thread.alone():
            if self._own is not None:
                self._own.forget_prefixes()
            else:
                self._model_runner().prefixes.clear()

    def _model_runner(self) -> ModelRunner:
        if self._runner is None:
            raise StokerError(
                f"{self.name or 'this model'} is served by {self.engine}, which has no Transformers model; code that"
                ' reads or tunes the model needs causal_lm(..., engine="transformers")'
            )
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
    ) -> list[str]:
        """Return the continuation of each prompt, special tokens left out.

        A text ends at the model's end token, at one of the `stop` texts (which is left out), or at `max_new_tokens`.
        Raises ValueError for an empty prompt, and for more tokens than the model reads or its cache holds, before any
        text is complete.

        Args:
            prompts: The texts to continue.
            max_new_tokens: Most tokens of each text.
            batch_size: Most prompts of this call that are written at a time; 0 leaves it to the engine.
            temperature: 0 takes the likeliest token each time.
            top_p: Draw from the likeliest tokens that make up this probability.
            seed: One seed for the call and the prompt's place in it, or a list with one per prompt.
            stop: Texts that end a text.
            prefix: Put before every prompt.
        """
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, stop=tuple(stop))
        return self._texts.write(prompts, sampling, seed=seed, batch_size=batch_size, prefix=prefix)

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yield what `generate` returns for a prompt, in pieces as they are written. An iterator that is closed ends
        the request.

        Args:
            prompt: The text to continue.
            max_new_tokens, temperature, top_p, seed, stop: As in `generate`.

        Raises:
            ValueError: As in `generate`, when it is called.
        """
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=(seed, 0), stop=tuple(stop)
        )
        return self._texts.pieces(prompt, sampling)

    def complete(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        json_schema: str = "",
        engine_options: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Return the continuation of a prompt with its facts: tokens, and why it ended.

        Args:
            prompt: The text to continue.
            max_new_tokens, temperature, top_p, seed, stop: As in `generate`.
            logprobs: Number of likeliest tokens to return for each place.
            json_schema: A JSON schema of the text (vLLM).
            engine_options: Options by vLLM's names: `ignore_eos` and `stop_token_ids` with every engine; `top_k`,
                `min_p`, `repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias` and `min_tokens`
                with vLLM.

        Raises:
            ValueError: As in `generate`, or the engine does not honour an option.
        """
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=(seed, 0), stop=tuple(stop),
            logprobs=logprobs, json_schema=json_schema, engine_options=tuple((engine_options or {}).items()),
        )  # fmt: skip
        return self._texts.complete(prompt, sampling)

    def stream_completion(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        json_schema: str = "",
        engine_options: Mapping[str, Any] | None = None,
    ) -> Iterator[CompletionToken]:
        """Yield the tokens of `complete` as they are written. An iterator that is closed ends the request.

        Args:
            prompt, max_new_tokens, temperature, top_p, seed, stop, logprobs, json_schema, engine_options: As in
                `complete`.

        Raises:
            ValueError: As in `complete`, when it is called or before the first token.
        """
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=(seed, 0), stop=tuple(stop),
            logprobs=logprobs, json_schema=json_schema, engine_options=tuple((engine_options or {}).items()),
        )  # fmt: skip
        return self._texts.tokens(prompt, sampling)

    # ---- scores of labels

    def label_scores(
        self, prompts: Sequence[str], labels: Sequence[str], *, batch_size: int = 1, prefix: str = ""
    ) -> list[list[float]]:
        """Return the log-likelihood (natural logarithm) of each label after each prompt: `[prompts][labels]`, all <= 0.

        Args:
            prompts: The texts before the labels.
            labels: Continuations of a prompt, so most begin with a space.
            batch_size: Prompts per batch.
            prefix: Put before every prompt.

        Raises:
            ValueError: A prompt or label is empty, or a text is longer than the model reads.
        """
        rows = self._prompts.rows(prompts, prefix=prefix, batch_size=batch_size)
        if not labels or not all(labels):
            raise ValueError(f"label_scores wants labels, none of them empty; it got {list(labels)!r}")
        if not rows:
            return []
        tails = self._prompts.label_tokens([prefix + prompt for prompt in prompts], rows, labels)
        longest = [max(map(len, tail)) for tail in tails]
        self._prompts.check_lengths([len(row) + more for row, more in zip(rows, longest, strict=True)])
        ahead = self._prompts.encode([prefix])[0] if prefix else ()
        scores: list[list[float]] = []
        most, check = max(batch_size, _SCORED_AT_ONCE), ambient.call_stop().check
        for start in range(0, len(rows), most):  # between them, the batch continues
            some = partial(
                self._scorer.score, rows[start : start + most], tails[start : start + most], prefix=ahead,
                batch_size=max(1, batch_size), check=check,
            )  # fmt: skip
            scores += self._thread.run(some)
        return scores


log = logging.getLogger(__name__)

_HOW_TO_INSTALL = "pip install 'stoker[vllm]' in the environment of this site's pilots, or leave engine=\"vllm\" away"


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    snapshot: bool = True,
    name: str = "",
    threads: int = 0,
    engine: str = "auto",
    graphs: bool = False,
) -> CausalLM:
    """Load the model at `path` on this library's device, as in `causal_lm`. `name`: the cache name of the object at
    `path`. Raises Transformers' errors, ValueError for an engine that does not support the model, and StokerError if
    vLLM cannot start."""
    began = time.monotonic()
    if threads:
        torch.set_num_threads(threads)
    be_quiet()
    device = ambient.device()
    wanted = dtype_of(dtype, path=path, device=device)
    why = why_vllm(engine, device=device)
    if why:
        if graphs:
            log.info("graphs=True has no effect on vLLM, which captures its own graphs")
        from stoker.contexts.inference.vllm_engine import start_engine  # it imports vLLM, which few environments have

        serving, how = start_engine(path, dtype=wanted, device=device, name=name, why=why)
        origin = f"{how}, in {show_seconds(time.monotonic() - began)}"
        log.info("model %s in vLLM on %s (%s): %s", path, device, why, origin)
        return CausalLM(None, serving.prompts.tokenizer, name=Path(path).name, origin=origin, engine=serving)
    loaded, how = load_parts(path, dtype=wanted, device=device, snapshot=snapshot, name=name)
    origin = f"{how}, in {show_seconds(time.monotonic() - began)}"
    if loaded.weights:
        origin += f" ({loaded.weights})"
    log.info("model %s on %s in %s: %s", path, device, loaded.model.dtype, origin)
    return CausalLM(loaded.model, loaded.tokenizer, name=Path(path).name, origin=origin, engine=engine, graphs=graphs)


def why_vllm(engine: str, *, device: str) -> str:
    """Return why vLLM writes; empty if another engine does. Raises StokerError if it is asked for and does not
    import."""
    if engine not in ("auto", "vllm"):
        return ""
    asked = engine == "vllm"
    if not asked and (not device.startswith("cuda") or importlib.util.find_spec("vllm") is None):
        return ""
    try:
        importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if asked and error.name == "vllm":
            raise StokerError(f'engine="vllm": vLLM is not installed here; {_HOW_TO_INSTALL}') from None
        return _broken(error, asked=asked)
    except Exception as error:  # its compiled parts are for other devices, or another PyTorch
        return _broken(error, asked=asked)
    return "it was asked for" if asked else "vLLM is installed, and the device is a GPU"


def _broken(error: Exception, *, asked: bool) -> str:
    if asked:
        raise StokerError(
            f'engine="vllm": vLLM is installed here and does not import ({error}); {_HOW_TO_INSTALL}'
        ) from error
    log.warning("vLLM is installed and does not import (%s); the default engine writes", error)
    return ""
