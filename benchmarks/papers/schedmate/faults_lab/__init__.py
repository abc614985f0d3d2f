"""Real libraries meet broken disks, networks, devices and full memories: parts of
`benchmarks.papers.schedmate.faults`."""
