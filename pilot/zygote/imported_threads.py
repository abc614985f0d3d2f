"""Which threads modules start when they are imported.

A fork copies the thread that forks alone, so whoever waits in a child for another one waits forever: a zygote that has
threads starts libraries in new interpreters. Threads that are of no use to a child do no harm.
"""

from __future__ import annotations

import os

HARMLESS = frozenset({"jemalloc_bg_thd"})
"""jemalloc's (pyarrow brings it along, and pandas brings pyarrow) gives memory back; a child goes on without it."""


class ImportedThreads:
    """Looks at this process's threads after each import."""

    def __init__(self) -> None:
        self._started: dict[int, str] = dict.fromkeys(_threads(), "")

    def look(self, module: str) -> None:
        """`module` was imported just now."""
        for thread in _threads():
            self._started.setdefault(thread, module)

    def harmful(self) -> dict[str, str]:
        """Modules that have started threads which are still there, and these threads' names."""
        names: dict[str, list[str]] = {}
        for thread, name in _threads().items():
            module = self._started.get(thread)
            if module and name not in HARMLESS:
                names.setdefault(module, []).append(name)
        return {module: ", ".join(sorted(each)) for module, each in names.items()}


def _threads() -> dict[int, str]:
    """The names of this process's threads, by their ids."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                found[int(thread)] = file.read().strip()
        except OSError:  # it has ended
            continue
    return found
