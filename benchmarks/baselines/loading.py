"""Make policies by their names in papers."""

from __future__ import annotations

from pathlib import Path

from stoker.manager.live.session_policies import find
from stoker.manager.policies import Named
from stoker.site import BASELINES

ROOT = Path(__file__).parents[2]


def policy(name: str) -> Named:
    """Return a baseline or a shipped policy. Raises ConfigError."""
    return find(BASELINES.get(name, name), folder=ROOT)
