"""The simulator runs the unmodified cores of the manager and the pilots in virtual time.

It models batch systems, nodes, network links, context loads, calls and engines.
"""
