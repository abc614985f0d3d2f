"""A dispatch policy that sends a call to the free library of its context that has served the fewest calls."""

from stoker.manager.core.seams import Send, SendGang
from stoker.manager.policies import Quiet


class LeastServed(Quiet):
    """Spread the calls of a context evenly over its libraries."""

    by_deadline = True
    honours = frozenset({"priority", "deadline"})

    def place(self, view, call):
        """Return the action that starts a new call, or None to let the call wait."""
        return self._start(call)

    def pull(self, view, library):
        """Start the first waiting call of a library with room, if enough libraries are free."""
        start = self._start(library.context.queue.head())
        return (start,) if start is not None else 0

    def on_out_of_calls(self, view, library):
        """Return no action for a library without work."""
        return ()

    def window(self, view, library):
        """Return the most calls that a library may hold: one per slot, no backlog."""
        return library.slots

    def _start(self, call):
        fewest, most = call.group.options.gang
        able = (library for library in call.group.context.idle.values() if library.admits(call))
        chosen = sorted(able, key=lambda library: (library.served, library.id))[:most]
        if len(chosen) < fewest:
            return None
        ids = tuple(library.id for library in chosen)
        return SendGang(call.id, ids) if most > 1 else Send(call.id, ids[0])
