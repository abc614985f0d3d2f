"""Policies that think in rounds, with fewer of them: everything is checked after each event."""

from __future__ import annotations

from stoker.manager.core.seams import Policies


def fewer_rounds(policies: Policies, *, period_s: float = 0.2) -> Policies:
    for seam in (policies.dispatch, policies.residency):
        seam.period_s = period_s  # type: ignore[misc]
    return policies
