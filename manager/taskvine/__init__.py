"""Plans and refusals for sites that run TaskVine. `stoker.pilot.taskvine` implements the pool."""
