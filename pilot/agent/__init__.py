"""The agent: one process per node that carries out the manager's orders and reports what happened."""
