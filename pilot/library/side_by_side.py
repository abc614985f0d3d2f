"""Which calls may run at the same time in a library with several slots.

All of them share one `sys.modules`. So two calls that want one module in two versions run one after the other: a call
begins when no running one clashes with it. Where the threads of a process cannot have a working folder and a umask
each, calls of programs in two folders run one after the other too. No call overtakes the one whose turn it is, so each
has its turn. Until it begins it waits in the queue, from where it can be given back, and its time limit does not run.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.contexts.carried_modules import versions_of_context
from stoker.contexts.code_payloads import versions_carried
from stoker.contexts.folders import ProgramFolder, is_seen_here
from stoker.contexts.recipe import ObjectRef
from stoker.pilot.core.turns import FirstCome
from stoker.pilot.library.functions import Function
from stoker.pilot.library.runner import RunnableCall

_Versions = Mapping[str, str]
"""The versions of the modules that a call wants, by name."""
_FOLDER = "/"
"""No module's name: stands for the folder that a call runs in."""


class SideBySide:
    """The calls that run, by slot. Its user holds a lock of its own around each use."""

    def __init__(self) -> None:
        self._of_context = versions_of_context()
        self._running: dict[int, _Versions] = {}
        self._of_next: tuple[RunnableCall, _Versions] | None = None
        self._keeps_one_waiting = False
        self._is_one_folder = False
        self._seen: dict[ProgramFolder, bool] = {}

    def share_a_folder(self) -> None:
        """All slots have one working folder and one umask."""
        self._is_one_folder = True

    def _folder_of(self, work: RunnableCall) -> str:
        """The folder and umask of a call; of one in its slot's own folder a text that no other call has."""
        folder, home = work.run.options.folder, work.run.options.home
        if home is not None and not folder and home not in self._seen:
            self._seen[home] = is_seen_here(home)
        if folder or (home is not None and self._seen[home]):
            return f"{folder} {home}"
        return str(work.spec.call)

    def take(self, queue: FirstCome[RunnableCall], slot: int) -> RunnableCall | None:
        """The call whose turn it is, which begins in this slot; None when none may begin yet."""
        while (entry := queue.next()) is not None:
            versions = self._wanted(entry[1])
            if any(_clash(versions, other) for other in self._running.values()):
                self._keeps_one_waiting = True
                return None
            if queue.begin(entry):
                self._running[slot] = versions
                self._of_next = None
                return entry[1]
        return None

    def end(self, slot: int) -> bool:
        """The call of this slot has ended, if it ran one. Returns whether another may wait for that."""
        self._running.pop(slot, None)
        waits, self._keeps_one_waiting = self._keeps_one_waiting, False
        return waits

    def _wanted(self, work: RunnableCall) -> _Versions:
        """The versions that a call wants: what its arguments bring, over what its function and its context bring."""
        if self._of_next is not None and self._of_next[0] is work:
            return self._of_next[1]
        versions = self._of_function(work.function)
        payload = work.spec.payload
        if isinstance(payload, ObjectRef):
            brought = versions_carried(work.run.objects.get(payload.name) or payload.source)
        else:
            brought = versions_carried(payload)
        if brought:
            versions = {**versions, **brought}
        if self._is_one_folder:
            versions = {**versions, _FOLDER: self._folder_of(work)}
        self._of_next = work, versions
        return versions

    def _of_function(self, function: Function) -> _Versions:
        own = function.versions()
        if not self._of_context or not own:
            return own or self._of_context
        return {**self._of_context, **own}


def _clash(one: _Versions, other: _Versions) -> bool:
    """Whether two calls want one module in two versions."""
    if one is other or not one or not other:
        return False
    return any(other.get(name, version) != version for name, version in one.items())
