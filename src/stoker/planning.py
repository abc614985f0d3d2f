"""The amount of work in a run of an application, for `stoker plan`.

An application names a `Work` in the entry point group `stoker.forecasts`. `stoker plan SITE NAME` then forecasts the
end of a run from earlier calls of the work's function (`mine.functions:score`).
"""

from __future__ import annotations

from stoker.manager.study.evidence import Work

__all__ = ["Work"]
