"""The policy of `live_models`: `slinfer` that keeps its instances."""

from __future__ import annotations

from stoker.manager.core.seams import Policies
from stoker.manager.policies.slinfer import slinfer


def patient() -> Policies:
    return slinfer(keep_alive_s=3600.0)
