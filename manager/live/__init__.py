"""The manager's live shell: sockets, clock, journal and history around the pure core.

`server` is the one loop; `doors` its ROUTER socket with CURVE, who may come in and who has left; `journal` what
survives a killed manager; `replay` the way back from it; `verify` holds what is decided on it against `decisions` that
were made; `history` what loads and runs have cost before.
"""
