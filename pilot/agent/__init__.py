"""The agent: one process a node, which does what the manager orders and tells it what really happened."""
