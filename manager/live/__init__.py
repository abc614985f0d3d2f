"""Run the pure core with sockets, a clock, a journal and a history.

`server` is the loop, `sockets` its socket. `compaction` shortens the journal with a `snapshot` of the core. `restore`
restores a manager from both, `replay` a core to inspect.
"""
