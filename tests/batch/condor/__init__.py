"""An HTCondor pool for tests: real daemons if they are on PATH, else a stand-in."""
