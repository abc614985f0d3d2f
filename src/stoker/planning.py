"""The amount of work in a run of an application, for `stoker plan`.

An application registers a `Work` in the entry point group `stoker.forecasts`. `stoker plan SITE NAME` then forecasts
the end of a run from earlier calls of the function (`mine.functions:score`) in that `Work`.
"""

from __future__ import annotations

from stoker.manager.study.evidence import Work

__all__ = ["Work"]
