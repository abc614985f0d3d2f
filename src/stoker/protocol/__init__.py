"""Messages between processes, as frozen structs, in one module per receiver.

`to_manager`, `to_pilot` and `to_client` messages use ZeroMQ. `to_library` and `to_agent` messages use a Unix socket on
the pilot. `wire` encodes and numbers frames.
"""
