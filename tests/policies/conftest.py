from core.conftest import cluster, toy

__all__ = ["cluster", "toy"]
