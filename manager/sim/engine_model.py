"""What a language model's engine costs on one kind of device, as a scenario or a profile says it.

Its batch follows the engine's own rules (`stoker.contexts.batching`), its steps take what was measured
(`stoker.contexts.step_times`, `stoker profile`). `EngineFloor` is the least that follows from that: what no policy
and no luck can make shorter.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker.contexts.batching import BatchLimits
from stoker.contexts.step_times import StepTable, StepTimes
from stoker.site import Size

_Rows = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
_NONE = Size(0)
TICK_S = 1e-6
"""The agenda rounds to this: a step of a run may be shorter by as much."""


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine on one kind of device. `times`: seconds of its steps, on a device of speed 1; in a scenario a table, or
    the file that `stoker profile --json` has written.

    `rows`, `prefill_tokens`, `prefill_requests`, `mixes`, `cache_tokens`, `page_tokens`: see
    `stoker.contexts.batching`. With `token`, the bytes of a token in the cache, the cache is what a library's
    reservation has beyond the `weights`, and grows and shrinks with it. `most_output`: tokens that a request may write
    at the most, for which an engine keeps room while it does not know better (0: as many as it will write).
    """

    times: StepTimes
    rows: _Rows = 32
    prefill_tokens: _Rows = 512
    cache_tokens: _Tokens = 0
    token_bytes: Size = msgspec.field(default=_NONE, name="token")
    weights_bytes: Size = msgspec.field(default=_NONE, name="weights")
    most_output: _Tokens = 0
    prefill_requests: _Tokens = 0
    mixes: bool = False
    page_tokens: _Tokens = 0

    def __post_init__(self) -> None:
        if not self.times.prefill or not self.times.decode:
            raise ValueError(
                "times: an engine needs prefill and decode, at least a cell [tokens, length, seconds] each"
            )
        if not self.times.is_sound():
            raise ValueError("times: a number in it is none that a measurement gives")
        for cell in (*self.times.prefill, *self.times.decode):
            if not cell.seconds > 0:
                raise ValueError(f"times: a step of {cell.tokens:g} tokens takes {cell.seconds:g} s")
        if self.token_bytes and self.cache_tokens:
            raise ValueError("cache_tokens: with token the cache is what the reservation has room for; leave it out")

    def limits(self, memory_bytes: int) -> BatchLimits:
        """What a batch may hold in a library that has reserved so much of each device."""
        cache_tokens = self.cache_tokens
        if self.token_bytes:
            cache_tokens = max(1, (memory_bytes - self.weights_bytes) // self.token_bytes)
        return BatchLimits(
            self.rows, self.prefill_tokens, cache_tokens, self.prefill_requests, self.mixes, self.page_tokens
        )


class EngineFloor:
    """The least that a request takes on an engine, whatever else its batch holds (`StepTable.floor`)."""

    def __init__(self, model: EngineModel, *, speed: float = 1.0) -> None:
        times = model.times
        self._step_s, self._token_s = StepTable(times.decode).floor(length=1.0, most=model.rows)
        most = model.prefill_tokens + (model.rows if model.mixes else 0)
        prefill_s, self._read_s = StepTable(times.prefill).floor(length=0.5, most=most)
        if model.mixes:  # a token may be written in a step that reads prompts
            self._step_s, self._token_s = min(self._step_s, prefill_s), min(self._token_s, self._read_s)
        self._speed = speed

    def run_s(self, prompt: int, output: int) -> float:
        """From its beginning to its last token. The last token of a prompt may be read in a step that writes."""
        return self._without_rounding(self._read_s * (prompt - 1) + self._step_s * (output - 1), output)

    def device_s(self, prompt: int, output: int) -> float:
        """What a device computes for it."""
        return self._without_rounding(self._read_s * (prompt - 1) + self._token_s * (output - 1), output)

    def _without_rounding(self, seconds: float, steps: int) -> float:
        return max(0.0, seconds / self._speed - TICK_S * (steps + 1))
