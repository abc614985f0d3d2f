"""How long a program says at its start that it is going to run. Pure.

`max_steps=1000` is no progress, but with a count of steps that has no total it says how far there is to go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from stoker.manager.advice.metrics.counts import EPOCH, STEP
from stoker.manager.advice.metrics.numerals import WHOLE, number

_TOTALS = re.compile(
    r"(?<![A-Za-z0-9])(?:(?P<step>total optimization steps|max_iters|max_steps|max_train_steps|train_iters|total_steps"
    r"|num_train_steps|num_steps|num_iterations|total steps|max_updates?|num_boost_round|n_estimators)"
    r"|(?P<epoch>num epochs|num_train_epochs|num_epochs|max_epochs?|epochs|total_epochs|n_epochs))"
    rf"['\"]?[\s.]*[:= ]\s*(?P<value>{WHOLE})(?![\w.]*\w)",
    re.IGNORECASE,
)


def stated_totals(lines: Iterable[str]) -> dict[str, float]:
    """Unit (step, epoch) to its total, from the first lines of a log. Of several statements the first one counts."""
    found: dict[str, float] = {}
    for line in lines:
        for match in _TOTALS.finditer(line[:4096]):
            if (value := number(match["value"])) > 0:
                found.setdefault(STEP if match["step"] else EPOCH, value)
    return found
