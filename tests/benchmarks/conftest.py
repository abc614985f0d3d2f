"""Provide the fixtures `cluster` and `toy` of `tests/core`, and a private home folder."""

from api.conftest import own_home
from core.conftest import cluster, toy

__all__ = ["cluster", "own_home", "toy"]
