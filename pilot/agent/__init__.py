"""The agent: one process per node that executes the manager's orders and reports the results."""
