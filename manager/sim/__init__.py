"""The simulator: the manager's core and the pilots' core in virtual time.

`stoker.manager.core` decides about calls, unmodified, with the policies of a session. The simulator models the
world that carries out its commands: batch systems, nodes, links, loads, calls, and engines whose batches follow
the rules of the real ones.
"""
