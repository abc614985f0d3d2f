"""The amount of work in a run of an application, for `stoker plan`.

An application names a `Work` in the entry point group `stoker.forecasts`; `stoker plan SITE NAME` then forecasts the
end of a run from the times of earlier calls of its function. `function` includes its module, `mine.functions:score`.
"""

from __future__ import annotations

from stoker.manager.study.evidence import Work

__all__ = ["Work"]
