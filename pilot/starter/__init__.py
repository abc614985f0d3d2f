"""The program that starts a pilot on a node without Stoker.

It uses only the standard library and the modules that `stoker.manager.environment.carrying` puts into its file.
"""
