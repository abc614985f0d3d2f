"""Client side: Parsl's executor, `@stoker.app`, `stoker.load`, `stoker.map`, and the connection to the manager."""
