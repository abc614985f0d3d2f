"""The manager as a function of (state, event, now): no sockets, no clock, no files, no chance.

`events` go in, `commands` come out, `core.Core.handle` is the door. `state` holds the nouns, `seams` the four questions
that policies answer and the actions they may answer with; `story` and `report` tell people what is going on, and
`validate` proves after every event of every test that nothing is promised twice and no call is lost.
"""
