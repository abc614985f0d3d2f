"""A dispatch policy: a call goes to the free library of its context that has served the fewest calls."""

from stoker.manager.core.seams import Send, SendGang
from stoker.manager.policies import Quiet


class LeastServed(Quiet):
    """Spreads the calls of a context evenly over its libraries."""

    by_deadline = True
    honours = frozenset({"priority", "deadline"})

    def place(self, view, call):
        """A call has come: where it goes, or None to let it wait."""
        return self._start(call)

    def pull(self, view, library):
        """A library has room, and calls wait: the first of them starts, if enough libraries are free."""
        start = self._start(library.context.queue.head())
        return (start,) if start is not None else 0

    def dry(self, view, library):
        """A library has nothing to do, and nothing waits."""
        return ()

    def window(self, view, library):
        """How many calls a library may hold: no backlog."""
        return library.slots

    def _start(self, call):
        fewest, most = call.group.options.gang
        able = (library for library in call.group.context.idle.values() if library.admits(call))
        chosen = sorted(able, key=lambda library: (library.served, library.id))[:most]
        if len(chosen) < fewest:
            return None
        ids = tuple(library.id for library in chosen)
        return SendGang(call.id, ids) if most > 1 else Send(call.id, ids[0])
