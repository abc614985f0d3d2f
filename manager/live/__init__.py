"""The manager's live shell: sockets, clock, journal and history around the pure core.

`server` is the one loop; `doors` its ROUTER socket with CURVE, who may come in and who has left; `journal` what
survives a killed manager (`records`, `segments` and `syncing` are its parts); `compaction` keeps it small with the
`snapshot` of a core (`pickled`). `past` reads a journal, `comeback` makes a manager of it, `replay` a core for people
to ask; `verify` holds what is decided on it against `decisions` that were made; `history` what loads and runs have
cost before.
"""
