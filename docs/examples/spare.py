"""A policy that keeps libraries free for calls that have not arrived yet."""

from stoker.manager.policies import LoadWhereWanted


class Spare(LoadWhereWanted):
    """Load a library for every waiting call, and one spare; the default waits until a load pays."""

    spare = 1

    def worth_loading(self, context, alive):
        """Return the number of libraries to load in addition to `alive`, which are hot or loading."""
        pays = super().worth_loading(context, alive)
        if context.load_failures:
            return pays
        free = sum(library.load < library.slots for library in alive)
        return max(pays, context.queue.count + self.spare - free)
