"""Measures what texts of each length take, each padded to its length: the staircase of Arlo §3.3, Fig. 2.

Runs inside a library. A batch is one text, a token shorter than its length, so that there is something to mask as
there is for nearly every text. Lengths take turns, so that what slows the machine down for a while slows all of them;
runtimes that are compiled are measured one after the other, because each is compiled anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import torch

from stoker.contexts.compiling import Runtime, compile_runtime, device_kind, wants_compiling
from stoker.contexts.encoder_facts import SHORTEST_RUNTIME
from stoker.contexts.length_profiles import EncoderProfile, LengthTime, usual_lengths
from stoker.errors import RecipeError

REPEATS = 30
_FEWEST_REPEATS = 5
_LIMIT_S = 90.0
"""Once so long was measured, there are no more repeats than the fewest."""
_WARM_UP = 3

Told = Callable[[float, float], None]
"""Takes how far it is and how far it goes."""


class TimedRuntime(Runtime, Protocol):
    """A runtime of the model."""

    @property
    def is_compiled(self) -> bool:
        """True once it is."""

    def time_batch(self) -> float:
        """The seconds of one batch."""

    def close(self) -> None:
        """End what it computes in."""


class MeasuredEncoder(Protocol):
    """What is measured: an `EncoderModel`, or what stands for one in a test."""

    name: str
    longest: int
    model: Any

    @property
    def device(self) -> str:
        """As PyTorch names it."""

    def as_runtime(self, length: int) -> TimedRuntime:
        """A runtime with its weights."""


def profile_lengths(
    model: MeasuredEncoder,
    lengths: Sequence[int] = (),
    *,
    step: int = 0,
    dtype: str = "auto",
    compiled: bool | str = "auto",
    repeats: int = REPEATS,
    told: Told | None = None,
) -> EncoderProfile:
    """The profile of a model over these lengths, which rise (none: multiples of `step` up to the model's longest text,
    see `usual_lengths`).
    `dtype` and `compiled` as the runtimes will have them.

    Raises RecipeError for lengths that do not rise or that the model does not read, and ContextError for a runtime that
    cannot be compiled although that is wanted.
    """
    asked = tuple(lengths) or usual_lengths(model.longest, step=step)
    _refuse(asked, longest=model.longest)
    told = told or _tell_nobody
    is_compiled = wants_compiling(model.device, compiled)
    if is_compiled:
        samples, is_compiled = _one_after_the_other(model, asked, compiled=compiled, repeats=repeats, told=told)
    else:
        samples = _in_turns(model, asked, repeats=repeats, told=told)
    return EncoderProfile(
        lengths=tuple(_length_time(tokens, taken) for tokens, taken in samples.items()),
        name=model.name,
        dtype=dtype,
        computed_dtype=str(model.model.dtype).removeprefix("torch."),
        compiled=compiled,
        is_compiled=is_compiled,
        device=device_kind(model.device),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        repeats=min(map(len, samples.values())),
        measured_at=time.time(),
    )


Samples = dict[int, list[float]]
"""The seconds that batches of each length took."""


def _in_turns(model: MeasuredEncoder, lengths: Sequence[int], *, repeats: int, told: Told) -> Samples:
    runtimes = {tokens: model.as_runtime(tokens) for tokens in lengths}
    for runtime in runtimes.values():
        for _ in range(_WARM_UP):
            runtime.time_batch()
    samples: Samples = {tokens: [] for tokens in lengths}
    until = time.monotonic() + _LIMIT_S
    for number in range(repeats):
        if number >= _FEWEST_REPEATS and time.monotonic() > until:
            break
        for tokens, runtime in runtimes.items():
            samples[tokens].append(runtime.time_batch())
        told(number + 1, repeats)
    return samples


def _one_after_the_other(
    model: MeasuredEncoder, lengths: Sequence[int], *, compiled: bool | str, repeats: int, told: Told
) -> tuple[Samples, bool]:
    """The samples, and True if every runtime was compiled."""
    samples: Samples = {}
    compiled_all = True
    for number, tokens in enumerate(lengths):
        torch._dynamo.reset()  # a network has room for a few compiled forms, no more
        runtime = model.as_runtime(tokens)
        compile_runtime(runtime, compiled)
        compiled_all &= runtime.is_compiled
        for _ in range(_WARM_UP):
            runtime.time_batch()
        taken = samples[tokens] = list[float]()
        until = time.monotonic() + _LIMIT_S / len(lengths)
        while len(taken) < repeats and (len(taken) < _FEWEST_REPEATS or time.monotonic() < until):
            taken.append(runtime.time_batch())
        runtime.close()
        told(number + 1, len(lengths))
    return samples, compiled_all


def _tell_nobody(done: float, total: float) -> None:
    del done, total


def _length_time(tokens: int, taken: Sequence[float]) -> LengthTime:
    middle = median(taken)
    return LengthTime(tokens, middle, median(abs(each - middle) for each in taken))


def _refuse(lengths: Sequence[int], *, longest: int) -> None:
    if lengths[0] < SHORTEST_RUNTIME or any(a >= b for a, b in pairwise(lengths)):
        raise RecipeError(f"lengths to measure rise, from {SHORTEST_RUNTIME} tokens on; they are {list(lengths)}")
    if longest and lengths[-1] > longest:
        raise RecipeError(f"a length of {lengths[-1]} tokens cannot be measured: the model reads {longest} at the most")
