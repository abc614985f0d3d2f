"""Prompt tuning with deadlines (PromptTuner): soft prompts tuned over real data, from a good initial text.

    from stoker.apps.prompt_tuning import tune

This application uses the tuner and the bank of `stoker.tuning`.

functions.py  the context and the decorated functions; start here
submit.py     `tune(job)`, the future of a tuned prompt
run.py        jobs from files to results, attached or detached; prompts for a bank
watch.py      one submitted job: its state in the session, its results
serving.py    a tuned prompt in a models file
board.py      the state of each job on disk and as text; options of a submission
report.py     met and missed deadlines, with reasons
cli.py        `stoker tune`, and `stoker run prompt_tuning`
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
