"""TaskVine's settings for a site, and requests that such a site refuses. `stoker.pilot.taskvine` runs the workers."""
