"""The function of this application that runs on a pilot. Its context is a ready-made one: `encoder(path)`.

profile = measure_lengths.with_options(context=encoder("models/small"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker import app
from stoker.contexts import EncoderProfile, progress

if TYPE_CHECKING:
    from stoker.contexts import EncoderModel


class LengthsRequest(msgspec.Struct, frozen=True):
    """What is measured: `step` tokens between two lengths, 0 = as many as the model wants; and how runtimes compute."""

    step: int = 0
    dtype: str = "auto"
    compiled: bool | str = "auto"


@app
def measure_lengths(model: EncoderModel, request: LengthsRequest) -> EncoderProfile:
    """Profile the model; it says how far it is."""
    return model.profile_lengths(
        step=request.step, dtype=request.dtype, compiled=request.compiled,
        told=lambda done, total: progress(done, total),
    )  # fmt: skip
