"""The client's side: Parsl's executor, `@stoker.app`, `stoker.load`, `stoker.map`, and the link to the manager."""
