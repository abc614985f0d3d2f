"""Run the manager's core, which does no I/O, with sockets, a clock, a journal and records of earlier sessions.

`server` contains the manager's loop. `compaction` replaces old journal files by a `snapshot` of the core. `restore`
restores a manager from journal and snapshot. `replay` restores a core for inspection.
"""
