"""The program that turns a node without Stoker into a pilot.

It uses only the standard library and the modules that `stoker.manager.environment.carrying` puts into its file.
"""
