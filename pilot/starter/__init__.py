"""The program that turns a node without Stoker into a pilot: it fetches and unpacks the environment, then runs the
pilot.

The program uses only the standard library and the modules of Stoker that `stoker.manager.environment.carrying` puts
into its file.
"""
