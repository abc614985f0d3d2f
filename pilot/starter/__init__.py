"""The program of a bare node: it gets the environment, unpacks it, and becomes the pilot.

It uses only the standard library and a few parts of Stoker, which `stoker.manager.environment.carrying` puts into one
file. `start.sh` runs that file.
"""
