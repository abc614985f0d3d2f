"""A policy that keeps libraries free for calls that have not come yet."""

from stoker.manager.policies import LoadWhereWanted


class Spare(LoadWhereWanted):
    """Loads for every call that waits, and once more, where the default waits until a load pays."""

    spare = 1

    def worth_loading(self, context, alive):
        """How many more libraries are to be loaded, beside those that are hot or on their way."""
        pays = super().worth_loading(context, alive)
        if context.load_failures:
            return pays
        free = sum(library.load < library.slots for library in alive)
        return max(pays, context.queue.count + self.spare - free)
