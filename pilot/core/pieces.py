"""The pieces that running calls yield, from their library to the manager.

They are not in the manager's journal and not in numbered frames. So the pilot keeps those of each call that the client
has not acknowledged, and says them again whenever something may have lost them: after each welcome, and when the client
asks. The library yields no more than a window of them ahead, which bounds what is kept. A call's end is told when its
client has all of its pieces: nothing is kept beyond that.
"""

from __future__ import annotations

from stoker.pilot.core.commands import PassOn, TellLibrary
from stoker.pilot.core.state import CoreState, PieceWindow, PilotLibrary
from stoker.protocol import to_agent, to_library, to_manager, to_pilot
from stoker.protocol.calls import WINDOW_PIECES
from stoker.protocol.ids import CallId


def came(state: CoreState, library: PilotLibrary, message: to_agent.Yielded) -> None:
    """A call has yielded. Raises ValueError for pieces that do not follow those before, or are too many."""
    window = library.streams.get(message.call)
    if window is None:  # it was taken away from the library meanwhile
        return
    if message.run != window.run:
        window.begin(message.run)
    if message.first != window.first + len(window.items):
        raise ValueError(f"piece {message.first} of call {message.call} does not follow the one before")
    window.items.extend(message.items)
    if len(window.items) > WINDOW_PIECES:
        raise ValueError(f"call {message.call} has sent {len(window.items)} pieces that are not acknowledged")
    if not state.awaits_welcome:  # else they are said with the rest, after the welcome
        passed = to_manager.CallYielded(
            library.number, message.call, message.run, message.first, message.items, message.waits
        )
        state.out.append(PassOn(passed))


def taken(state: CoreState, message: to_pilot.AckPieces) -> None:
    """The client has pieces, and perhaps asks for those after them."""
    library = state.libraries.get(message.library)
    window = library.streams.get(message.call) if library is not None else None
    if library is None or window is None:
        return
    if message.run == window.run and window.take(message.upto):
        upto = to_library.Taken(message.call, message.run, window.first)
        state.out.append(TellLibrary(library.number, upto))
    if message.again and not state.awaits_welcome:
        _say_again(state, library, message.call, window)


def say_all_again(state: CoreState) -> None:
    """The manager may have lost what it was told: say all that is not acknowledged."""
    for library in state.libraries.values():
        for call, window in library.streams.items():
            _say_again(state, library, call, window)


def _say_again(state: CoreState, library: PilotLibrary, call: CallId, window: PieceWindow) -> None:
    if window.items:
        items = list(window.items)
        passed = to_manager.CallYielded(library.number, call, window.run, window.first, items, waits=True)
        state.out.append(PassOn(passed))
