"""`cluster` as in `tests/core`, and `toy`: the same core with pilots that act by themselves in virtual time."""

from core.conftest import cluster

__all__ = ["cluster"]
