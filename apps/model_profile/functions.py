"""The function of this application that runs on a pilot, with the model as its context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker import app
from stoker.contexts import progress

if TYPE_CHECKING:
    from stoker.contexts import CausalLM

_SEND_LIMIT_S = 5.0
"""Maximum seconds for the library to send the measurement to the manager."""


class MeasuredModel(msgspec.Struct, frozen=True):
    """The profile as plain values. `kept`: True if the manager stores the profile."""

    profile: dict[str, Any]
    kept: bool


@app
def measure_steps(model: CausalLM, quick: bool) -> MeasuredModel:
    found = model.profile(quick=quick, told=progress)
    return MeasuredModel(msgspec.to_builtins(found), model.wait_until_times_taken(timeout_s=_SEND_LIMIT_S))
