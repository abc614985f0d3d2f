"""`cluster` and `toy`, as in `tests/core`, and a home of its own, as in `tests/api`."""

from api.conftest import own_home
from core.conftest import cluster, toy

__all__ = ["cluster", "own_home", "toy"]
