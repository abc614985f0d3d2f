"""The manager's live shell: sockets, clock, journal and history around the pure core.

`server` is the one loop, `doors` its socket, `journal` what survives a killed manager. `compaction` keeps the journal
small with a `snapshot` of the core; `comeback` makes a manager of both, `replay` a core for people to ask.
"""
