"""The amount of work in a run of an application, for `stoker plan`.

An application registers a `Work` in the entry point group `stoker.forecasts`. `stoker plan SITE NAME` forecasts when a
run ends. It uses earlier calls of the function that the `Work` names (`mine.functions:score`).
"""

from __future__ import annotations

from stoker.manager.study.evidence import Work

__all__ = ["Work"]
