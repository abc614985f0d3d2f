"""Plans and refusals for sites that run TaskVine. The pool itself is `stoker.pilot.taskvine`."""
