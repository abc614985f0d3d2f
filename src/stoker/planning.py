"""What an application tells `stoker plan`: how much work a run of it is.

An application names a `Work` in the entry point group `stoker.forecasts`; `stoker plan SITE NAME` then says when a run
of it would be finished, from what earlier calls of its function took. `function` is written with its module,
`mine.functions:score`.
"""

from __future__ import annotations

from stoker.manager.study.evidence import Work

__all__ = ["Work"]
