"""The simulator: the manager's core and the pilots' core in virtual time.

Nothing here decides anything about calls: `stoker.manager.core` does, unmodified, with the policies that a session
would have. What is modelled is the world that carries out its commands: batch systems, nodes, links, loads, calls; and
the engines of language models, whose batches follow the rules of the real ones.
"""
