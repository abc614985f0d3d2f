"""Run the pure core with sockets, a clock, a journal and a history.

`server` contains the manager's loop. `compaction` shortens the journal by a `snapshot` of the core. `restore` restores
a manager from both, and `replay` restores a core for inspection.
"""
