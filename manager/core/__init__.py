"""The manager as a pure function of (state, event, now): no sockets, clock, files or randomness.

Read `reactor` first: it lists the steps of each event. `state` and `nouns` contain the records, `seams` the interface
of policies.
"""
