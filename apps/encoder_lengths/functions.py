"""The function of this application that runs on a pilot. Its context is a ready-made one: `encoder(path)`.

profile = measure_lengths.with_options(context=encoder("models/small"))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from stoker import app
from stoker.contexts import EncoderProfile, progress


class ProfiledEncoder(Protocol):
    """What an encoder context offers to this application."""

    def profile_lengths(
        self, *, step: int, dtype: str, compiled: bool | str, told: Callable[[float, float], None]
    ) -> EncoderProfile:
        """Measure what texts take whose lengths are multiples of the step."""


class LengthsRequest(msgspec.Struct, frozen=True):
    """What is measured: `step` tokens between two lengths, 0 = as many as the model wants; and how runtimes compute."""

    step: int = 0
    dtype: str = "auto"
    compiled: bool | str = "auto"


@app
def measure_lengths(model: ProfiledEncoder, request: LengthsRequest) -> EncoderProfile:
    """Profile the model; it says how far it is."""
    return model.profile_lengths(
        step=request.step, dtype=request.dtype, compiled=request.compiled,
        told=lambda done, total: progress(done, total),
    )  # fmt: skip
