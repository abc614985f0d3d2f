"""The program of a bare node: it gets the environment, unpacks it, and becomes the pilot.

`stoker.manager.environment.carrying` puts it and a few parts of Stoker into one file, which `start.sh` runs.
"""
