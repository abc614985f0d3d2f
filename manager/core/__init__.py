"""The manager as a function of (state, event, now): no sockets, no clock, no files, no randomness.

`events` go in and commands come out. `reactor` lists what happens about each event. `state` and `nouns` hold what the
manager knows; `seams` the questions that policies answer, and the actions they may answer with; `story` and `report`
tell people what is going on. `manager.sim.validate` proves after every event of a test that nothing is promised twice
and no call is lost.
"""
