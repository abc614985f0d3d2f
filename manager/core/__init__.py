"""The logic of the manager as a pure function of (state, event, now), without sockets, clocks, files or randomness.

Read `reactor` first. `state` and `nouns` contain the records, and `seams` the interface of policies.
"""
