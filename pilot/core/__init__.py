"""A pilot as a pure function: `core.PilotCore.handle(event, now)` makes every decision of a pilot.

Shells carry its commands out: the agent with processes and sockets, the simulator in virtual time, a pool through
TaskVine. Each feeds the core through a `core.EventQueue`.

`reactor` lists what happens about each event. Steps live in the file of their subject: `starting` and `lifecycle` of
libraries, `running` of calls, `objects`, `memory`, `limits`, `probes`, `presence`. They change `state`, and return
`commands` for `events`. `turns` decides which call of a library runs next, and which library of a device computes next.
"""
