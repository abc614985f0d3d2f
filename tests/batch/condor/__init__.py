"""A pool of HTCondor for tests: of its own daemons where these are on PATH, else a stand-in."""
