"""TaskVine's settings for a site, and checks of unsupported requests. `stoker.pilot.taskvine` runs the workers."""
