"""Messages between processes, as frozen structs: one module per receiver, no I/O.

`to_manager`, `to_pilot` and `to_client` messages travel over ZeroMQ; `to_library` and `to_agent` messages over a Unix
socket on the pilot. `wire` encodes frames and numbers them, so a reconnect neither loses nor repeats a frame.
"""
