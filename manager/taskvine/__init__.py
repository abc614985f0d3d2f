"""Plans and refusals for sites that run TaskVine. The pool is `stoker.pilot.taskvine`."""
