"""The simulator: the cores of the manager and the pilots, unmodified, in virtual time.

The simulator models the world that carries out their commands: batch systems, nodes, links, loads, calls, and engines.
"""
