"""How much of a device an instance reserves: its weights, and a cache that follows what it serves (SLINFER §VII).

A request's cache holds its prompt and what it writes: at least the mean of the requests before it (eq. 2). An instance
that needs more than it has grows at once to more than that (`watermark`, 25 %), and one that needs less
shrinks only when it has far too much: a resize copies the cache (Figure 17). Where a device has no room for the
watermark, what is required is enough (§VII-D). What is promised counts at once; the pilot lets an instance grow when
another has really shrunk or gone (`stoker.pilot.core.memory`).
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core.nouns import Call, Context, Device, Library, LibraryState
from stoker.manager.core.seams import Resize
from stoker.manager.policies.sizes import known_bytes
from stoker.manager.policies.slinfer.compute import output_tokens, prompt_tokens


class CacheSizes:
    """Sizes of reservations, with a watermark (0.25: a quarter more than is required)."""

    def __init__(self, *, watermark: float) -> None:
        self.watermark = watermark

    def required(self, context: Context, device: Device, calls: Iterable[Call]) -> int:
        """Bytes without which these calls do not fit at their peaks (eq. 2, with the weights). The least is what the
        recipe declares, a cache of the longest text."""
        needs = context.recipe.needs
        tokens = sum(prompt_tokens(call) + output_tokens(call) for call in calls)
        return known_bytes(context, device.facts) + needs.token_bytes * max(0, tokens - needs.cache_tokens)

    def recommended(self, context: Context, device: Device, required: int) -> int:
        """The same with the watermark: of the cache, not of the weights."""
        return self._with_watermark(required, _weights(context, device))

    def _with_watermark(self, required: int, weights: int) -> int:
        return required + int(self.watermark * (required - weights))

    def admit(self, library: Library, call: Call) -> int | None:
        """What an instance has to reserve for one more call: 0 if what it has will do, None if its device has no
        room."""
        device = library.devices[0]
        return self.grow(library, self.required(library.context, device, (*library.held.values(), call)))

    def grow(self, library: Library, required: int) -> int | None:
        """What an instance has to reserve so that it has what is required, as `admit` says."""
        device = library.devices[0]
        if required <= library.promised_bytes:
            return 0
        room = library.promised_bytes + min(each.budget_bytes for each in library.devices)
        if required > room or library.state is not LibraryState.READY:
            return None
        return min(room, self.recommended(library.context, device, required))

    def lacks(self, library: Library, call: Call) -> int:
        """Bytes that the devices of an instance would have to have free for one more call."""
        device = library.devices[0]
        required = self.required(library.context, device, (*library.held.values(), call))
        return required - library.promised_bytes - min(each.budget_bytes for each in library.devices)

    def shrink(self, library: Library) -> tuple[Resize, ...]:
        """What an instance gives back, if it has far more than it needs (§VII-B): not while a resize is under way."""
        if library.resizing or library.state is not LibraryState.READY:
            return ()
        context, device = library.context, library.devices[0]
        weights, needs = _weights(context, device), context.recipe.needs
        least = self._with_watermark(weights + needs.token_bytes * needs.cache_tokens, weights)
        if library.promised_bytes <= self._with_watermark(least, weights):
            return ()  # it is as small as one without calls: most are, and each is looked at in each round
        recommended = self._with_watermark(self.required(context, device, library.held.values()), weights)
        enough = self._with_watermark(recommended, weights)
        return (Resize(library.id, recommended),) if enough < library.promised_bytes else ()


def _weights(context: Context, device: Device) -> int:
    """Of what a recipe declares that which is no cache."""
    needs = context.recipe.needs
    return known_bytes(context, device.facts) - needs.token_bytes * needs.cache_tokens
