"""vLLM as an engine in this process (Kwon et al., arXiv:2309.06180).

vLLM's cache cannot be resized. Sleep (level 1, not on CPUs) moves the weights to host memory and drops the cache. Sleep
was broken in some versions of vLLM. Therefore each sleep measures the freed memory, and each wake compares the tokens
of a fixed prompt. Each token of a label has its own request, because `prompt_logprobs` would read every prompt again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from stoker.contexts import ambient
from stoker.contexts.engine_settings import EngineSettings
from stoker.contexts.inference.adapter import (
    EngineLoad,
    EngineMemory,
    FinishReason,
    GenerationRequest,
    NewToken,
    Sampling,
    ScoredPromptToken,
    TokenLikelihood,
    WrittenText,
)
from stoker.contexts.inference.kernels import combine_seed_pair
from stoker.contexts.inference.options import ENGINE_OPTIONS, STRUCTURES, OptionRefused
from stoker.contexts.inference.vllm_start import NO_ADAPTER, VLLMAdapter, VLLMStart
from stoker.contexts.prompts import Ids, PromptReader, find_end_tokens
from stoker.contexts.snapshot import prepare_weights_folder
from stoker.errors import StokerError
from stoker.units import show_bytes

log = logging.getLogger(__name__)

_USUAL_ROW_TOKENS = 512
_LABELS_AT_ONCE = 128  # maximum tokens whose log-likelihoods vLLM returns in one request
_PROBE_TOKENS = 8
_LEAST_FREED_SHARE = 0.5  # a warning is logged if a sleep frees less than this share of the engine's memory


class _VLLMRequest:
    def __init__(self, request: GenerationRequest, written: WrittenText, virtual_tokens: int) -> None:
        self.request = request
        self.written = written
        self.prompt_tokens = virtual_tokens + len(request.prompt)
        self.prompt: tuple[ScoredPromptToken, ...] = ()
        self.is_running = False


class VLLMEngine:
    """An engine (`adapter.InferenceEngine`) that runs vLLM. It also scores labels, as `forward.ModelRunner` does."""

    name = "vllm"

    def __init__(self, start: VLLMStart, prompts: PromptReader) -> None:
        self._llm: Any = start.llm
        self._start = start
        self.prompts = prompts
        self.chosen = start.why
        self.device = start.device
        self.started_bytes = start.device_memory_bytes
        self.reused_tokens = 0
        self._texts = prompts.texts
        self._open: dict[str, _VLLMRequest] = {}
        self._early_tokens: list[NewToken] = []  # tokens that were written while labels were scored
        self._load = EngineLoad()
        self._numbers = 0
        self._freed_bytes = 0
        self._asleep = False
        self._broken = ""
        self._fingerprint: tuple[int, ...] = ()

    # ---- requests

    def add(self, request: GenerationRequest) -> None:
        self._check_usable()
        adapter = self._start.adapters.get(request.sampling.adapter, llm=self._llm, dtype=self._start.dtype)
        self._texts.check(request, virtual_tokens=adapter.virtual_tokens)
        if adapter.virtual_tokens and request.sampling.prompt_logprobs:
            raise OptionRefused("prompt_logprobs", "vLLM supports no prompt_logprobs after a soft prompt; leave it out")
        length = adapter.virtual_tokens + len(request.prompt) + max(1, request.sampling.max_new_tokens)
        if length > self._start.longest:
            raise ValueError(
                f"{len(request.prompt)} prompt tokens and {request.sampling.max_new_tokens} new tokens do not fit into"
                f" the key-value cache, which has room for {self._start.longest} tokens of one request; give the model"
                " more memory (device_memory=)"
            )
        params = vllm_sampling_params(request.sampling, ends=self._texts.ends)
        form, _ = request.sampling.structure or ("", None)
        self._send_request(str(request.id), request.prompt, params, adapter=adapter, form=form)
        self._open[str(request.id)] = _VLLMRequest(request, WrittenText(self._texts, request), adapter.virtual_tokens)

    def _check_usable(self) -> None:
        if self._asleep or self._broken:
            raise ValueError(self._broken or "the model is asleep; wake it first")

    def abort(self, request: int) -> None:
        self._early_tokens = [token for token in self._early_tokens if token.request != request]
        if self._open.pop(str(request), None) is not None:
            self._llm.abort_request([str(request)])

    def step(self) -> list[NewToken]:
        if self._early_tokens:
            new, self._early_tokens = self._early_tokens, []
            return new
        return self._step({}) if self._open else []

    def count_slots(self) -> int:
        usual = max(1, min(_USUAL_ROW_TOKENS, self._start.longest))
        return max(1, min(self._start.rows, self._start.cache_tokens // usual))

    def get_load(self) -> EngineLoad:
        running = sum(writing.is_running for writing in self._open.values())
        ended = sum(token.finish is not None for token in self._early_tokens)
        return msgspec.structs.replace(
            self._load, running=running + ended, waiting=len(self._open) - running, reused_tokens=self.reused_tokens
        )

    # ---- memory

    def get_memory(self) -> EngineMemory:
        """Return the engine's memory; during sleep, only memory that was not freed."""
        weights, cache, tokens = self._start.weights_bytes, self._start.cache_bytes, self._start.cache_tokens
        awake = EngineMemory(weights, cache, cache, token_bytes=cache // max(1, tokens), fixed_tokens=tokens)
        if not self._asleep:
            return awake
        held = max(0, weights + cache - self._freed_bytes)
        return msgspec.structs.replace(awake, weights_bytes=max(0, held - cache), held_bytes=min(held, cache))

    def resize(self, cache_bytes: int) -> None:
        """Raise ValueError for a smaller cache, because vLLM cannot free a part of the cache."""
        if cache_bytes < self._start.cache_bytes:
            raise ValueError(
                f"vLLM reserved {show_bytes(self._start.cache_bytes)} for its key-value cache at its start and cannot"
                f" change this to {show_bytes(max(0, cache_bytes))}; load the model again with less device_memory"
            )

    def forget_prefixes(self) -> None:
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        if self._open or self._early_tokens:
            raise RuntimeError(f"{len(self._open) or 1} requests are running; the model cannot sleep until they end")
        if self._asleep:
            return
        if not self._fingerprint:
            self._fingerprint = self._generate_probe_tokens()
        self.forget_prefixes()
        before = self._start.free_device_bytes()
        if self._start.on_gpu:
            self._llm.sleep(level=1)
        self._asleep = True
        self._freed_bytes = max(0, self._start.free_device_bytes() - before)
        held = self._start.weights_bytes + self._start.cache_bytes
        if not self._start.on_gpu:
            log.info("vLLM cannot sleep on a CPU: cached prefixes are dropped, but %s stay in use", show_bytes(held))
        elif self._freed_bytes < _LEAST_FREED_SHARE * held:
            log.warning("sleep has freed %s of %s", show_bytes(self._freed_bytes), show_bytes(held))

    def wake(self) -> None:
        """Wake vLLM after `sleep`. Raises StokerError if it then writes other tokens for a test prompt than before."""
        if not self._asleep:
            return
        if self._start.on_gpu:
            self._llm.wake_up()
        self._asleep, self._freed_bytes = False, 0
        self.forget_prefixes()
        if (found := self._generate_probe_tokens()) != self._fingerprint:
            self._broken = (
                f"vLLM writes other tokens after a sleep ({found}) than before ({self._fingerprint}); its results"
                " cannot be trusted. Load the model again"
            )
            raise StokerError(self._broken)

    def stop(self) -> None:
        self._open.clear()
        if self._llm is not None:
            self._start.shut_down()
            self._llm = None

    # ---- scores

    def score(
        self,
        rows: list[Ids],
        tails: list[list[Ids]],
        *,
        prefix: Ids = (),
        batch_size: int = 1,
        check: Callable[[], None] = lambda: None,
    ) -> list[list[float]]:
        del prefix, batch_size  # vLLM finds shared prefixes by itself
        self._check_usable()
        wanted: dict[Ids, dict[int, float]] = {}
        for row, some in zip(rows, tails, strict=True):
            for tail in some:
                for at, token in enumerate(tail):
                    wanted.setdefault(row + tail[:at], {})[token] = 0.0
        asked: dict[str, dict[int, float]] = {}
        for ids, chances in wanted.items():
            tokens = sorted(chances)
            for start in range(0, len(tokens), _LABELS_AT_ONCE):
                named = tokens[start : start + _LABELS_AT_ONCE]
                params = _greedy_params(max_tokens=1, logprob_token_ids=named, output_kind=RequestOutputKind.DELTA)
                asked[self._send_own_request(ids, params)] = chances
        try:
            while asked:
                check()
                self._early_tokens.extend(self._step(asked))
        finally:
            if asked:
                self._llm.abort_request(list(asked))
        return [
            [sum(wanted[row + tail[:at]][token] for at, token in enumerate(tail)) for tail in some]
            for row, some in zip(rows, tails, strict=True)
        ]

    # ---- vLLM

    def _step(self, asked: dict[str, dict[int, float]]) -> list[NewToken]:
        began = time.perf_counter()
        new: list[NewToken] = []
        decoded = begun = read = 0
        for output in self._llm.step():
            if (chances := asked.pop(output.request_id, None)) is not None:
                [told] = output.outputs[0].logprobs
                chances |= {token: float(chance.logprob) for token, chance in told.items() if token in chances}
            elif (writing := self._open.get(output.request_id)) is not None:
                if writing.is_running:
                    decoded += 1
                else:
                    reused = int(output.num_cached_tokens or 0)
                    self.reused_tokens += reused
                    writing.is_running, begun, read = True, begun + 1, read + writing.prompt_tokens - reused
                new += self._convert_output_tokens(output, writing)
        self._load = self._load.after_step(
            decoded=decoded, running=decoded + begun, prompt_tokens=read, new_tokens=len(new),
            busy_s=time.perf_counter() - began,
        )  # fmt: skip
        return new

    def _convert_output_tokens(self, output: Any, writing: _VLLMRequest) -> list[NewToken]:
        [written] = output.outputs
        id, sampling = writing.request.id, writing.request.sampling
        if (most := sampling.prompt_logprobs) and output.prompt_logprobs:
            writing.prompt = tuple(
                ScoredPromptToken(token, *log_likelihoods_of(token, told, most=most))
                if told
                else ScoredPromptToken(token)
                for token, told in zip(writing.request.prompt, output.prompt_logprobs, strict=True)
            )
        if not sampling.max_new_tokens:
            if not output.finished:
                return []
            del self._open[output.request_id]
            return [NewToken(id, -1, finish=FinishReason.LENGTH, prompt=writing.prompt)]
        new: list[NewToken] = []
        for at, token in enumerate(written.token_ids):
            text = writing.written.add(token)
            logprob, likeliest = (
                log_likelihoods_of(token, written.logprobs[at], most=most)
                if (most := sampling.logprobs)
                else (None, ())
            )
            prompt, writing.prompt = writing.prompt, ()
            new.append(NewToken(id, token, text, writing.written.finish, logprob, likeliest, prompt=prompt))
            if writing.written.finish is not None:
                break
        if writing.written.finish is not None:
            del self._open[output.request_id]
            if not output.finished:  # Stoker found a stop text, of which vLLM does not know, so end the request
                self._llm.abort_request([output.request_id])
        elif output.finished:  # the grammar cannot be compiled or continued, or vLLM failed
            del self._open[output.request_id]
            form, _ = sampling.structure or ("", None)
            why = f"the text cannot be written within its {form}" if form else "an error of vLLM"
            error = f"vLLM ended the request early ({written.finish_reason}): {why}; its log has the reason"
            new.append(NewToken(id, -1, finish=FinishReason.STOP, error=error, option=form))
        return new

    def _send_request(
        self, id: str, prompt: Ids, params: SamplingParams, *, adapter: VLLMAdapter = NO_ADAPTER, form: str = ""
    ) -> None:
        try:
            self._llm.add_request(id, adapter.build_prompt(prompt), params, lora_request=adapter.lora)
        except VLLMValidationError as error:
            why = f"vLLM cannot take this request: {error}"
            option = error.parameter if error.parameter in ENGINE_OPTIONS else form
            raise (OptionRefused(option, why) if option else ValueError(why)) from error

    def _send_own_request(self, prompt: Ids, params: SamplingParams) -> str:
        self._numbers += 1
        name = f"own-{self._numbers}"
        self._send_request(name, prompt, params)
        return name

    def _generate_probe_tokens(self) -> tuple[int, ...]:
        params = _greedy_params(max_tokens=_PROBE_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY)
        name = self._send_own_request(tuple(range(5, 21)), params)
        while True:
            for output in self._llm.step():
                if output.request_id == name and output.finished:
                    return tuple(output.outputs[0].token_ids)


def _greedy_params(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **options)


def start_engine(
    path: str, *, dtype: Any, device: str, name: str, why: str, settings: EngineSettings,
    adapters: Mapping[str, str] | None = None,
) -> tuple[VLLMEngine, str]:  # fmt: skip
    """Start vLLM with the model at `path`. Return the engine and the model's origin. `adapters`: folders by name."""
    folder, how = prepare_weights_folder(path, dtype=dtype, name=name)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    settings.set_chat_template(tokenizer)
    start = VLLMStart(
        folder, dtype=str(dtype).removeprefix("torch."), device=device, parts=len(ambient.devices()),
        device_memory_bytes=ambient.device_memory_bytes(), why=why, settings=settings, adapters=adapters,
    )  # fmt: skip
    ends = find_end_tokens(start.end_tokens, tokenizer)
    prompts = PromptReader(tokenizer, ends=ends, longest=start.model_longest, vocabulary=start.vocabulary)
    return VLLMEngine(start, prompts), how


# ---- requests and log-likelihoods of vLLM

_STOKER_OPTIONS = ("ignore_eos", "stop_token_ids")


def vllm_sampling_params(sampling: Sampling, *, ends: frozenset[int]) -> SamplingParams:
    """Return the vLLM options of a request. vLLM always writes at least one token."""
    form, value = sampling.structure or ("", None)
    held = StructuredOutputsParams(**{"json" if form == "json_schema" else form: value}) if form else None
    others = {name: value for name, value in sampling.engine_options if name not in (*_STOKER_OPTIONS, *STRUCTURES)}
    return SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=max(1, sampling.max_new_tokens),
        seed=combine_seed_pair(sampling.seed) if sampling.temperature else None, logprobs=sampling.logprobs or None,
        stop_token_ids=sorted(sampling.all_end_tokens(ends)), ignore_eos=True, detokenize=False,
        structured_outputs=held, prompt_logprobs=sampling.prompt_logprobs or None,
        output_kind=RequestOutputKind.DELTA, **others,
    )  # fmt: skip


def log_likelihoods_of(token: int, told: dict[int, Any], *, most: int) -> tuple[float, tuple[TokenLikelihood, ...]]:
    """Return the log-likelihoods of a token and of the likeliest tokens. `told`: vLLM's log-likelihoods by token."""
    ordered = sorted(told.items(), key=lambda chance: -chance[1].logprob)
    likeliest = tuple(TokenLikelihood(id, chance.logprob) for id, chance in ordered[:most])
    return float(told[token].logprob), likeliest
