"""The program of a bare node: it gets the environment, unpacks it, and becomes the pilot.

It uses only the standard library and the parts of Stoker that `stoker.manager.environment.carrying` puts into its file.
"""
