"""What a pilot decides, without doing it: pure code that the agent, the library process and the simulator all run.

`ledger` is the device memory that is held, `cache` what to evict for a new object, `turns` whose call runs next in a
library, `library` what the agent knows of a library from its order to its end.
"""
