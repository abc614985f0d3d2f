"""The manager's live shell: sockets, clock, journal and history around the pure core.

`server` is the one loop; `doors` its ROUTER socket with CURVE, who may come in and who has left; `journal` what
survives a killed manager; `replay` the way back from it; `history` what loads and runs have cost before.
"""
