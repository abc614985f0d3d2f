"""Run the pure core with sockets, a clock, a journal and a history.

`server` contains the manager's loop. `compaction` replaces old journal files by a `snapshot` of the core. `restore`
restores a manager from journal and snapshot. `replay` restores a core for inspection.
"""
