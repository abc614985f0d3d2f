from api.conftest import own_home
from core.conftest import cluster, toy

__all__ = ["cluster", "own_home", "toy"]
