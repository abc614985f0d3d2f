"""The policy of `benchmarks.serving.live_models`: `slinfer`, whose instances stay."""

from __future__ import annotations

from stoker.manager.core.seams import Policies
from stoker.manager.policies.slinfer import slinfer


def patient() -> Policies:
    return slinfer(keep_alive_s=3600.0)
