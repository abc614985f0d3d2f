"""Which threads modules start when they are imported.

A fork copies the thread that forks alone: a lock that another one held is never released in the child. So a zygote that
has threads starts libraries in new interpreters. Threads that are of no use to a child, and whose library sees to its
locks around a fork, do no harm.
"""

from __future__ import annotations

import os
import time

HARMLESS = frozenset({"jemalloc_bg_thd"})
"""jemalloc's (pyarrow brings it along, and pandas brings pyarrow) gives memory back; a child goes on without it."""
_NAMED_S = 0.05
"""A thread gets its name by itself, a moment after it has started."""


class ImportedThreads:
    """Looks at this process's threads after each import."""

    def __init__(self) -> None:
        self._started = dict.fromkeys(_threads(), "what came before the imports")

    def attribute_to(self, module: str) -> None:
        """Threads that were not here before are of this module, which was imported just now."""
        for thread in _threads():
            self._started.setdefault(thread, module)

    def harmful(self) -> dict[str, str]:
        """By who has started them, the names of threads that are here, but for the main one and harmless ones."""
        found = self._harmful()
        if found:
            time.sleep(_NAMED_S)
            found = self._harmful()
        return found

    def _harmful(self) -> dict[str, str]:
        names: dict[str, list[str]] = {}
        for thread, name in _threads().items():
            if thread != os.getpid() and name not in HARMLESS:
                names.setdefault(self._started.get(thread, "something later"), []).append(name)
        return {module: ", ".join(sorted(each)) for module, each in names.items()}


def _threads() -> dict[int, str]:
    """The names of this process's threads, by their ids; the main one has the process's."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                found[int(thread)] = file.read().strip()
        except OSError:  # it has ended
            continue
    return found
