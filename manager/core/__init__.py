"""The logic of the manager as a pure function of (state, event, now), without sockets, clocks, files or randomness.

Read the module `reactor` first, which lists the steps of each event. The modules `state` and `nouns` contain the
records of the manager's state. The module `seams` contains the interface of policies.
"""
