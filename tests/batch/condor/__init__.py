"""A pool of HTCondor for tests: its own daemons if they are on PATH, else a stand-in."""
