"""Prompt tuning with deadlines (PromptTuner): soft prompts tuned over real data, begun from a good text.

    from stoker.apps.prompt_tuning import tune

The tuner and the bank are `stoker.tuning`; this is the application around them.

functions.py            the decorated functions: what stays hot, and what is called. Begin here
submit.py  `tune(job)`, the future of a tuned prompt
board.py, watch.py      where each job is, for `stoker tune status`; looking at the session for it
show.py, display.py     jobs as lines; jobs while somebody waits for them
options.py              how jobs are submitted
submission.py, run.py   one job on its way; jobs from their files to their results
report.py  which deadlines were met, and why not
detach.py, banking.py   a submission that outlives its terminal; prompts for a bank
cli.py     `stoker tune`, and `stoker run prompt_tuning`
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
