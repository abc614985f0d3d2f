"""What sites that run TaskVine are told and refused. The pool itself is `stoker.pilot.taskvine`."""
