"""Messages between processes: one file a receiver, plain frozen structs, no I/O.

`to_manager`, `to_pilot`, `to_client` travel over ZeroMQ; `to_library`, `to_agent` over a Unix socket on the pilot.
`wire` encodes and decodes frames, refuses what is not in the protocol, and numbers frames, so that a peer that
reconnects neither loses nor repeats one.
"""
