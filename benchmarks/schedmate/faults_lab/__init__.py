"""Real libraries that meet broken disks, networks, devices and full memories: the parts of `benchmarks.schedmate.faults`."""
