"""Run the pure core with sockets, a clock, a journal and a history.

`server` contains the loop, `sockets` its socket. `compaction` shortens the journal by a `snapshot` of the core.
`restore` restores a manager from journal and snapshot; `replay` restores a core to inspect.
"""
