"""A pilot as a pure function: `core.PilotCore.handle(event, now)` decides all that a pilot decides.

Shells carry its commands out: the agent with processes and sockets, the simulator in virtual time, a pool through
TaskVine. Each feeds the core through a `core.EventQueue`, and has `timers` where it has no others.

Files stand in three ranks, and imports go one way: *handlers* (`orders`, `library_messages`, `presence`,
`limits`, `probes`, `device_memory`) call *transitions* (`holding`, `lifecycle`, `starting`, `running`, `wants`,
`leaving`: the only writers of their part of the state), which change *nouns* (`state`, `ledger`, `stages`, `health`,
`events`, `commands`).

`turns` is whose call runs next in a library's process, `device_turns` which of the libraries that share a device
computes next, `step_knowledge` what steps of their engines take, `cache` what to evict for a new object.
"""
