"""Make policies by their names in papers."""

from __future__ import annotations

from pathlib import Path

from stoker.manager.live.session_policies import find_policy
from stoker.manager.policies import ShippedPolicy
from stoker.site import BASELINES

ROOT = Path(__file__).parents[2]


def policy(name: str) -> ShippedPolicy:
    """Return a baseline or a shipped policy. Raises ConfigError."""
    return find_policy(BASELINES.get(name, name), folder=ROOT)
