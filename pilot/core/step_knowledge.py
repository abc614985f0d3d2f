"""What steps of engines take on this pilot's devices: what the manager knew, and what libraries have measured since.

The pilot weighs offers by it (`shadow_validation`). Libraries report their steps every few seconds, on their way to the
manager, which keeps them for good.
"""

from __future__ import annotations

from stoker.contexts.step_times import StepTimes
from stoker.pilot.core.state import CoreState, PilotLibrary


def learn(state: CoreState, library: PilotLibrary, times: StepTimes | None) -> None:
    """Steps of a library's engine took so long; numbers that no measurement gives are left out."""
    if times is None or not times.samples or not times.is_sound():
        return
    key = _key(state, library)
    known = state.step_times.get(key)
    state.step_times[key] = times if known is None else known.joined(times)


def told(state: CoreState, library: PilotLibrary) -> None:
    """The manager has said what steps of a library's engine take. What this pilot has measured since is part of that,
    or newer."""
    if _key(state, library) not in state.step_times:
        learn(state, library, library.ordered.steps)


def known(state: CoreState, library: PilotLibrary) -> StepTimes | None:
    """What steps of a library's engine take; None while prompts, or the tokens behind them, are not measured."""
    times = state.step_times.get(_key(state, library))
    return times if times is not None and times.prefill and times.decode else None


def _key(state: CoreState, library: PilotLibrary) -> tuple[str, str]:
    return library.recipe.key, state.devices_of(library)[0].kind
