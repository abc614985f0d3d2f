"""Prompt tuning with deadlines (PromptTuner): soft prompts tuned over real data, begun from a good text.

    from stoker.apps.prompt_tuning import tune

The tuner and the bank are `stoker.tuning`; this is the application around them.

functions.py  the decorated functions: what stays hot, and what is called. Begin here
submit.py     `tune(job)`, the future of a tuned prompt
run.py        jobs from their files to their results, waited for or detached; prompts for a bank
watch.py      one submitted job: its state from what the session says, its results
board.py      where each job is, on disk and as lines for people; the options of a submission
report.py     which deadlines were met, and why not
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
