"""`cluster` and `toy`, as in `tests/core`."""

from core.conftest import cluster, toy

__all__ = ["cluster", "toy"]
