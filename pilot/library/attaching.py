"""A call that attaches to a shared memory segment of another process does not take it along when its library ends.

Python's resource tracker unlinks every segment that its processes have registered, once they have ended. That is right
for the segments that calls have created: nothing of a session outlives it. But `SharedMemory` registers a segment that
it only attaches to as well (python/cpython#82300), which may belong to the user's program or to another library. In a
library it does not. So a library may unregister a name that its tracker never heard of, for which the tracker would
print a traceback: it is told of the name just before.
"""

from __future__ import annotations

import functools
import os
import threading
from multiprocessing import resource_tracker, shared_memory
from typing import Any


def register_created_segments_only() -> None:
    """From now on this process and its forks leave segments that they attach to alone. Python programs that it starts
    do not, `multiprocessing`'s `spawn` and `forkserver` among them."""
    within = threading.local()
    register, unregister = resource_tracker.register, resource_tracker.unregister
    make = shared_memory.SharedMemory.__init__

    def register_own(name: Any, rtype: str) -> None:
        if not getattr(within, "attaches", False):
            register(name, rtype)

    def unregister_any(name: Any, rtype: str) -> None:
        if rtype == "shared_memory":  # a child may have registered it, so this process cannot know whether it is
            register(name, rtype)
        unregister(name, rtype)

    @functools.wraps(make)
    def init(self: Any, name: str | None = None, create: bool = False, *args: Any, **options: Any) -> None:
        within.attaches = not create
        try:
            make(self, name, create, *args, **options)
        finally:
            within.attaches = False

    resource_tracker.register = register_own
    resource_tracker.unregister = unregister_any
    shared_memory.SharedMemory.__init__ = init  # type: ignore[method-assign]


def forget_tracker() -> None:
    """In a fork: start a resource tracker of its own when one is needed, which ends with this process and its children.
    That of the process that forked it goes on as long as that does."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
    tracker._fd = tracker._pid = None
