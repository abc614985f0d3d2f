"""Policies by the names that papers' evaluations use; baselines are loaded as a user's own policies are."""

from __future__ import annotations

from pathlib import Path

from stoker.manager.live.session_policies import find
from stoker.manager.policies import Named
from stoker.site import BASELINES

ROOT = Path(__file__).parents[2]


def policy(name: str) -> Named:
    """A baseline, loaded by the path of its file; any other name is one that ships. Raises ConfigError."""
    return find(BASELINES.get(name, name), folder=ROOT)
