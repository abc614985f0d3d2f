"""The client: Parsl's executor, `@stoker.app`, `stoker.load`, `stoker.map`, and the link to the manager."""
