"""What advice can be about. A question names its subject, and the answer names it again: it may come much later."""

from __future__ import annotations

import msgspec

from stoker.protocol.ids import CallId, DeviceId, FunctionKey, LibraryId, PilotId, RecipeKey


class OfContext(msgspec.Struct, frozen=True, array_like=True, tag="context"):
    """What a context costs: its loads and its memory."""

    recipe: RecipeKey


class OfFunction(msgspec.Struct, frozen=True, array_like=True, tag="function"):
    """What calls of a function on a context cost."""

    function: FunctionKey
    recipe: RecipeKey


class OfFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Whose fault it was that a call failed, or a load (`call` is -1). `devices`: those of the library."""

    pilot: PilotId
    library: LibraryId
    call: CallId
    devices: tuple[DeviceId, ...] = ()


class OfPace(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """How fast a running call gets on, by what it prints."""

    library: LibraryId
    call: CallId


About = OfContext | OfFunction | OfFailure | OfPace
