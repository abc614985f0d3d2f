"""Run the pure core with sockets, a clock, a journal and a history.

`server` contains the manager's loop, and `sockets` contains the loop's socket. `compaction` shortens the journal by
storing a `snapshot` of the core. `restore` restores a manager from the journal and the snapshot. `replay` restores a
core for inspection.
"""
