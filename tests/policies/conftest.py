"""Provide the fixtures `cluster` and `toy` of `tests/core`."""

from core.conftest import cluster, toy

__all__ = ["cluster", "toy"]
