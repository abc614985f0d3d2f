"""Prompt tuning with deadlines (PromptTuner): tune soft prompts on data, from a good initial text.

    from stoker.apps.prompt_tuning import tune

This application uses the tuner and the prompt bank of `stoker.tuning`. Read `functions.py` first: it contains the
context and the decorated functions. `cli.py` defines `stoker tune` and `stoker run prompt_tuning`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.apps.prompt_tuning.submit import tune as tune

__all__ = ["tune"]


def __getattr__(name: str) -> Any:
    if name != "tune":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stoker.apps.prompt_tuning.submit import tune

    return tune
