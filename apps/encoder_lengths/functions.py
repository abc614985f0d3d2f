"""The function of this application that runs on a pilot, with the built-in context `encoder(path)`.

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
    """A measurement of an encoder. `step`: tokens between two measured lengths; 0: the encoder chooses."""

    step: int = 0
    dtype: str = "auto"
    compiled: bool | str = "auto"


@app
def measure_lengths(model: EncoderModel, request: LengthsRequest) -> EncoderProfile:
    return model.profile_lengths(step=request.step, dtype=request.dtype, compiled=request.compiled, told=progress)
