"""What runs of functions have cost."""

from __future__ import annotations

import math

from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_pilot import FunctionBlob


class Cost:
    """What runs of one function on one context have cost, whoever asked for them and how."""

    __slots__ = ("by_kind", "function", "least_s", "ordered_s", "recipe", "run_s", "runs")

    def __init__(self, function: FunctionBlob, recipe: RecipeKey) -> None:
        self.function = function
        self.recipe = recipe
        self.runs = 0
        self.run_s = 0.0
        self.ordered_s = 0.0
        """What a run was expected to take when the queue was put into order last."""
        self.least_s = math.inf
        """The shortest run, as far as runs are told apart: the least mean of those that ended together."""
        self.by_kind: dict[str, list[float]] = {}
        """Number, seconds and items of runs that are not in the performance history yet, by device kind."""
