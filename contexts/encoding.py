"""An encoder context for embeddings and classification, and a profile of its times by text length.

An embedding is the mean of the last hidden states (`mean`), or the last hidden state of the first (`cls`) or last token
(`last`). Padding is masked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch

from stoker.contexts import ambient
from stoker.contexts.compiling import Compiler, compile_runtime, device_hardware_name, should_compile
from stoker.contexts.inference.core_share import compute_context_for_device
from stoker.contexts.joined_batches import JoinedBatches
from stoker.contexts.length_profiles import EncoderProfile, LengthTime, lengths_to_measure
from stoker.contexts.model_source import POOLINGS, SHORTEST_RUNTIME, SentenceFacts, max_text_tokens
from stoker.contexts.prompts import TEXTS_PER_TOKENIZER_CALL, max_positions, refuse_one_text
from stoker.errors import InputTooLongError, RecipeError

_MIN_REPEATS = 5
_PROFILE_LIMIT_S = 90.0
"""Time limit of a profile in seconds. Even after the limit, each length is measured `_MIN_REPEATS` times."""
_WARM_UP_BATCHES = 3


def _time_runtimes_in_rotation(
    model: EncoderModel, samples: dict[int, list[float]], *, repeats: int, told: Callable[[float, float], None]
) -> None:
    """Time one batch of each length in each round, so that a slow phase of the machine affects all lengths equally."""
    runtimes = {tokens: model.as_runtime(tokens) for tokens in samples}
    for runtime in runtimes.values():
        _warm_up(runtime)
    until = time.monotonic() + _PROFILE_LIMIT_S
    for number in range(repeats):
        if number >= _MIN_REPEATS and time.monotonic() > until:
            break
        for tokens, runtime in runtimes.items():
            samples[tokens].append(runtime.time_batch())
        told(number + 1, repeats)


def _time_compiled_runtimes(
    model: EncoderModel, samples: dict[int, list[float]], *, compiled: bool | str, repeats: int,
    told: Callable[[float, float], None],
) -> bool:  # fmt: skip
    compiled_all = True
    for number, (tokens, taken) in enumerate(samples.items()):
        torch._dynamo.reset()  # forget the last length's code, because torch limits the compiled variants of a network
        runtime = model.as_runtime(tokens)
        compile_runtime(runtime, compiled)
        compiled_all &= runtime.is_compiled
        _warm_up(runtime)
        until = time.monotonic() + _PROFILE_LIMIT_S / len(samples)
        while len(taken) < repeats and (len(taken) < _MIN_REPEATS or time.monotonic() < until):
            taken.append(runtime.time_batch())
        runtime.close()
        told(number + 1, len(samples))
    return compiled_all


def _warm_up(runtime: EncoderModel) -> None:
    for _ in range(_WARM_UP_BATCHES):
        runtime.time_batch()


Text = str | tuple[str, str]
"""A text, or a pair of texts."""
_DEFAULT_SLOTS = 16


class TokenRow(NamedTuple):
    """Token ids of a text or a pair of texts. `types`: token types (0: first text, 1: second text); may be empty."""

    ids: list[int]
    types: list[int]


class RuntimeShape(NamedTuple):
    """Input shape of a runtime: tokens per text, and texts per batch."""

    length: int
    batch: int = 1


class EmbeddingOptions(TypedDict, total=False):
    """Options of `EncoderModel.embed_array`."""

    pooling: str
    normalize: bool
    batch_size: int
    truncate: bool


class EncoderModel:
    """An encoder and its tokenizer. Made by `encoder`. Concurrent calls share batches."""

    def __init__(
        self, model: Any, tokenizer: Any, *, facts: SentenceFacts | None = None, name: str = "", source: str = "",
        runtime: RuntimeShape | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.source = source
        """Cache name or hub name of the model."""
        self.facts = facts or SentenceFacts()
        self.runtime = runtime
        config = model.config
        self.longest = longest = max_text_tokens(
            model_type=config.model_type, positions=max_positions(config),
            padding=config.pad_token_id or 0, tokenizer=int(tokenizer.model_max_length), sentences=self.facts.longest,
        )  # fmt: skip
        if runtime is not None:
            self.longest = runtime.length
            if 0 < longest < runtime.length:
                why = f"the runtime takes {runtime.length} tokens, and the model accepts at most {longest}"
                raise RecipeError(why, option="length", longest=longest)
        classifies = getattr(config, "architectures", None) or [type(model).__name__]
        names = config.id2label if any(each.endswith("ForSequenceClassification") for each in classifies) else {}
        self.labels = [str(names[index]) for index in sorted(names)]
        """Names of the classes for `classify`; empty if the model cannot classify."""
        backbone = model.get_encoder() if config.is_encoder_decoder else model.base_model
        self._networks: dict[str, Callable[..., Any]] = {"classify": model, "embed": backbone}
        self._padding = next((id for id in (tokenizer.pad_token_id, config.pad_token_id) if id is not None), 0)
        if config.pad_token_id is None:  # some models need this id to find the end of a text
            config.pad_token_id = self._padding
        self._device = next(model.parameters()).device
        self._computing = compute_context_for_device(self.device)
        self._compiler: Compiler | None = None
        self._tokenizer_lock = threading.Lock()
        self._joined: JoinedBatches[TokenRow, npt.NDArray[np.float32]] = JoinedBatches(
            self._compute, length=lambda row: runtime.length if runtime is not None else len(row.ids)
        )

    @property
    def device(self) -> str:
        """PyTorch name of the model's device."""
        return str(self._device)

    def slots(self, device_memory_bytes: int) -> int:
        """Return the number of concurrent calls; for a runtime, its batch size (Arlo §3.4).

        Args:
            device_memory_bytes: Ignored.
        """
        del device_memory_bytes
        return self.runtime.batch if self.runtime is not None else _DEFAULT_SLOTS

    def as_runtime(self, length: int, *, batch: int = 1) -> EncoderModel:
        """Return a runtime that shares this model's weights.

        Args:
            length: Tokens to which each text is padded.
            batch: Texts per batch.

        Raises:
            RecipeError: `length` exceeds the model's limit.
        """
        return EncoderModel(
            self.model, self.tokenizer, facts=self.facts, name=self.name, source=self.source,
            runtime=RuntimeShape(length, batch),
        )  # fmt: skip

    @property
    def is_compiled(self) -> bool:
        """True if this runtime's network is compiled."""
        return self._compiler is not None

    @property
    def origin(self) -> str:
        """Origin of a runtime's compiled code; empty if the runtime is not compiled."""
        return self._compiler.code_origin if self._compiler is not None else ""

    def compile(self, compiler: Compiler) -> None:
        """Compile the network of a runtime. Afterwards the compiler's thread computes batches.

        Args:
            compiler: If the compiler fails, the runtime is unchanged.
        """
        kind, rows = "classify" if self.labels else "embed", self._tokenize([""], truncate=True, check=False)
        self._networks[kind] = compiler.compile(self._networks[kind], lambda: self._build_inputs(rows)[0])
        self._compiler = compiler

    def close(self) -> None:
        """Stop the compiler's thread."""
        if self._compiler is not None:
            self._compiler.close()

    def profile_lengths(
        self, lengths: Sequence[int] = (), *, step: int = 0, dtype: str = "auto", compiled: bool | str = "auto",
        repeats: int = 30, told: Callable[[float, float], None] = lambda *_: None,
    ) -> EncoderProfile:  # fmt: skip
        """Return the model's times at several input lengths.

        Args:
            lengths: Numbers of tokens, ascending. Empty: multiples of `step`, and the longest length.
            step: Tokens between two lengths; 0: at most 32 lengths.
            dtype, compiled: As in `encoder`.
            repeats: Maximum batches per length.
            told: Receives the number of finished parts, and their total.

        Raises:
            RecipeError: The lengths are not ascending, or exceed the model's limit.
            ContextError: A runtime cannot be compiled.
        """
        asked = tuple(lengths) or lengths_to_measure(self.longest, step=step)
        if asked[0] < SHORTEST_RUNTIME or any(a >= b for a, b in pairwise(asked)):
            raise RecipeError(f"lengths must be ascending, {SHORTEST_RUNTIME} tokens or more; they are {list(asked)}")
        if self.longest and asked[-1] > self.longest:
            raise RecipeError(f"{asked[-1]} tokens cannot be measured: the model accepts at most {self.longest}")
        samples: dict[int, list[float]] = {tokens: [] for tokens in asked}
        is_compiled = should_compile(self.device, compiled)
        if is_compiled:
            is_compiled = _time_compiled_runtimes(self, samples, compiled=compiled, repeats=repeats, told=told)
        else:
            _time_runtimes_in_rotation(self, samples, repeats=repeats, told=told)
        return EncoderProfile(
            lengths=tuple(
                LengthTime(tokens, middle := median(taken), median(abs(each - middle) for each in taken))
                for tokens, taken in samples.items()
            ),
            name=self.name, dtype=dtype, computed_dtype=str(self.model.dtype).removeprefix("torch."), compiled=compiled,
            is_compiled=is_compiled, device=device_hardware_name(self.device), threads=torch.get_num_threads(),
            torch=str(torch.__version__), repeats=min(map(len, samples.values())), measured_at=time.time(),
        )  # fmt: skip

    def time_batch(self) -> float:
        """Return the measured seconds of a batch with one text of maximum length."""
        (row,) = self._tokenize([""], truncate=True, check=False)
        count = self.longest - 1
        full = TokenRow([*row.ids[:1] * count], [*row.types[:1] * count])
        began = time.perf_counter()
        self._compute("classify" if self.labels else self.facts.pooling, [full])
        return time.perf_counter() - began

    def count_tokens(self, text: Text) -> int:
        """Return the number of tokens in a text, including special tokens.

        Args:
            text: The text, or a pair of texts.
        """
        return len(self._tokenize([text], truncate=False, check=False)[0].ids)

    def embed(self, texts: Sequence[str], **options: Unpack[EmbeddingOptions]) -> list[list[float]]:
        """Return the embedding of each text, `[texts][width]`.

        Args:
            texts, options: As in `embed_array`.

        Raises:
            ValueError: As in `embed_array`.
        """
        return [row.tolist() for row in self.embed_array(texts, **options)[0]]

    def embed_array(
        self,
        texts: Sequence[str],
        *,
        pooling: str = "",
        normalize: bool = True,
        batch_size: int = 32,
        truncate: bool = False,
    ) -> tuple[npt.NDArray[np.float32], int]:
        """Return the embeddings `[texts, width]` and the number of tokens.

        Args:
            texts: The texts.
            pooling: `mean`, `cls` or `last`; empty: the model's default.
            normalize: Scale each embedding to length 1.
            batch_size: Maximum texts per batch; a runtime may have smaller batches.
            truncate: Cut texts that are too long.

        Raises:
            ValueError: A text is too long for the model. A runtime raises the subclass InputTooLongError.
        """
        if pooling not in ("", *POOLINGS):
            raise ValueError(f"pooling is {pooling!r}: it must be one of {', '.join(POOLINGS)}")
        if not pooling and self.facts.trouble:
            raise ValueError(
                f"{self.name} needs an unsupported embedding: {self.facts.trouble}; set pooling= to ignore this"
            )
        rows = self._tokenize(texts, truncate=truncate)
        found = self._joined.run(pooling or self.facts.pooling, rows, batch_size=self._limit_batch_size(batch_size))
        vectors = np.stack(found) if found else np.zeros((0, 0), dtype=np.float32)
        if normalize and found:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors, sum(len(row.ids) for row in rows)

    def classify(
        self, texts: Sequence[Text], *, batch_size: int = 32, truncate: bool = False
    ) -> list[dict[str, float]]:
        """Return the probability of each label for each text. A regression model returns its outputs.

        Probabilities sum to 1, unless the model's config makes labels independent.

        Args:
            texts: Texts or pairs of texts.
            batch_size, truncate: As in `embed_array`.

        Raises:
            ValueError: As in `embed_array`, or the model cannot classify.
        """
        if not self.labels:
            raise ValueError(f"{self.name} has no classification head (it is a {type(self.model).__name__})")
        rows = self._tokenize(texts, truncate=truncate)
        scores = self._joined.run("classify", rows, batch_size=self._limit_batch_size(batch_size))
        shares = [self._probabilities(row.astype(np.float64)) for row in scores]
        return [dict(zip(self.labels, row.tolist(), strict=True)) for row in shares]

    def _probabilities(self, scores: Any) -> Any:
        problem = self.model.config.problem_type
        if problem == "regression":
            return scores
        if problem == "multi_label_classification" or len(scores) == 1:
            return 1.0 / (1.0 + np.exp(-scores))
        likely = np.exp(scores - scores.max())
        return likely / likely.sum()

    # ---- tokens

    def _tokenize(self, texts: Sequence[Text], *, truncate: bool, check: bool = True) -> list[TokenRow]:
        refuse_one_text(texts, what="text")
        pairs = [text if isinstance(text, tuple) else (text,) for text in texts]
        if len({len(pair) for pair in pairs}) > 1:
            raise ValueError("some texts are pairs and some are not; classify them in two calls")
        how = {"truncation": True, "max_length": self.longest} if truncate and self.longest else {}
        stop, rows = ambient.current_stop_request(), list[TokenRow]()
        for start in range(0, len(pairs), TEXTS_PER_TOKENIZER_CALL):
            stop.raise_if_requested()
            some = zip(*pairs[start : start + TEXTS_PER_TOKENIZER_CALL], strict=True)
            with self._tokenizer_lock:  # a tokenizer stores its truncation setting, so calls must not overlap
                found = self.tokenizer(*map(list, some), verbose=False, **how)
            ids = found["input_ids"]
            rows += map(TokenRow, ids, found.get("token_type_ids") or [[]] * len(ids))
        for number, row in enumerate(rows if check else ()):
            if not row.ids:
                raise ValueError(f"text {number} is empty; the model needs at least one token")
            if self.longest and len(row.ids) > self.longest:
                self._raise_too_long(number, len(row.ids))
        return rows

    def _raise_too_long(self, number: int, tokens: int) -> None:
        advice = "Split it, or use only its beginning: truncate=True"
        if self.runtime is None:
            raise ValueError(f"text {number} has {tokens} tokens; the model accepts at most {self.longest}. {advice}")
        told = f"text {number} has {tokens} tokens; this runtime accepts at most {self.longest}. Use a longer runtime."
        raise InputTooLongError(f"{told} {advice}", tokens=tokens, longest=self.longest)

    def _limit_batch_size(self, batch_size: int) -> int:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        return batch_size if self.runtime is None else min(batch_size, self.runtime.batch)

    # ---- the model

    def _compute(self, kind: Hashable, rows: list[TokenRow]) -> Sequence[npt.NDArray[np.float32]]:
        if self._compiler is not None:
            return list(self._compiler.run(lambda: self._compute_array(kind, rows)))
        with self._computing():
            return list(self._compute_array(kind, rows))

    def _compute_array(self, kind: Hashable, rows: list[TokenRow]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            numbers: npt.NDArray[np.float32] = self._run_network(kind, rows)[: len(rows)].float().cpu().numpy()
        return numbers

    def _build_inputs(self, rows: list[TokenRow]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        width = max(len(row.ids) for row in rows)
        if self.runtime is not None:
            rows = [*rows, *rows[:1] * (self.runtime.batch - len(rows))]
            width = self.runtime.length
        lengths = torch.tensor([len(row.ids) for row in rows], device=self._device)
        seen = torch.arange(width, device=self._device)[None, :] < lengths[:, None]
        ids = [row.ids + [self._padding] * (width - len(row.ids)) for row in rows]
        inputs = {"input_ids": torch.tensor(ids, device=self._device), "attention_mask": seen.long()}
        if rows[0].types:
            types = [row.types + [0] * (width - len(row.types)) for row in rows]
            inputs["token_type_ids"] = torch.tensor(types, device=self._device)
        return inputs, lengths

    def _run_network(self, kind: Hashable, rows: list[TokenRow]) -> Any:
        inputs, lengths = self._build_inputs(rows)
        if kind == "classify":
            return self._networks["classify"](**inputs).logits
        states = self._networks["embed"](**inputs).last_hidden_state
        if kind == "cls":
            return states[:, 0]
        if kind == "last":
            return states[torch.arange(len(lengths), device=self._device), lengths - 1]
        weights = inputs["attention_mask"][:, :, None].float()
        return (states.float() * weights).sum(dim=1) / lengths[:, None]
