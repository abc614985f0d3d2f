"""What runs on a node that has nothing: it gets the environment, unpacks it, and becomes the pilot.

Standard library alone, and those parts of Stoker that need no more: `stoker.manager.environment.carrying` puts them
into one file, which `start.sh` runs.
"""
