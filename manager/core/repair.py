"""The manager has lost a part of its journal: what its peers still know makes its picture whole again.

A host crash may take the end of a journal, and a damaged record leaves a hole. The manager that comes back then knows
less than it has acknowledged, and its peers do not keep what was acknowledged. It notices when they say hello
(`reliable`), and each peer says anew what it holds:

- A *client* is asked to submit again every call that it waits for (`ClientWelcome.again`). A call that the manager
  knows already stays as it is. One that the client does not name has had its end: it is forgotten. If it ran again
  meanwhile and failed (the file of its arguments is gone by then), that failure does not count.
- A *pilot*'s hello lists its libraries with their recipes and calls. A library that the manager does not know is
  adopted. A call that it does not know is an *orphan*: it keeps its place in the library, and goes on there when its
  client submits it again. If it ends before that, its end is kept for the client.
- The *factory* tells of blocks that the manager does not know (`block_updates`).

Numbers that the lost part had given away must not be given again, so a manager that came back leaves a gap before the
next one (`leave_gaps`).
"""

from __future__ import annotations

from collections import deque

from stoker.manager.core import blocks, ending, holding, libraries, registry
from stoker.manager.core.client import Client
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Library, Pilot
from stoker.manager.core.seams import PolicyError
from stoker.manager.core.state import JOURNAL_LOST, Orphan, State
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CLIENT_SHIFT, CallId, LibraryId, RecipeKey
from stoker.protocol.to_client import Results
from stoker.protocol.to_manager import LibraryFacts, PilotHello

KEPT_FORGOTTEN = 100_000
"""So many calls are remembered whose clients have their results already."""


def leave_gaps(state: State) -> None:
    """The manager came back: begin its next numbers at a round one behind those that it may have given away."""
    if state.next_library > 1 or state.next_client:
        libraries.leave_gap(state)
        registry.leave_gap(state)
    if state.next_block > 1:
        blocks.leave_gap(state)


# ---- clients


def ask_again(manager: Manager, client: Client) -> None:
    """Note which calls of a client are open, or have ended since the manager came back. If the client
    does not submit a call again, it has the result already. The manager sends it no result until it has submitted."""
    manager.state.notice(JOURNAL_LOST)
    client.unnamed = {id for id, call in manager.state.calls.items() if call.group.client is client}
    client.unnamed.update(end.call for end in client.unacked)


def resubmitted(manager: Manager, client: Client) -> None:
    """A client has said everything again."""
    state = manager.state
    unnamed, client.unnamed = client.unnamed, None
    if unnamed is None:
        state.refuse("a client that was not asked to has submitted its calls again")
        return
    for id in sorted(unnamed):
        call = state.calls.get(id)
        if call is not None:
            ending.forget(manager, call)
        state.forgotten[id] = None
    _tell_of_ends(manager, client, unnamed)
    while len(state.forgotten) > KEPT_FORGOTTEN:
        del state.forgotten[next(iter(state.forgotten))]
    for id, orphan in list(state.orphans.items()):
        if id >> CLIENT_SHIFT == client.number:
            del state.orphans[id]
            state.forgotten[id] = None
            _drop(manager, orphan.library, CallId(id), running=False)


def _tell_of_ends(manager: Manager, client: Client, unnamed: set[int]) -> None:
    """Tell a client of the ends that had to wait until it had said which calls it waits for."""
    for end in client.unacked:
        if end.call in unnamed and end.failure is not None:
            ending.forget_failure(manager.state, end)
    client.unacked = deque(end for end in client.unacked if end.call not in unnamed)
    if client.unacked and client.connected:
        manager.tell(client, Results(client.first_unacked, list(client.unacked)))


# ---- orphans


def is_unheard_of(state: State, id: int) -> bool:
    """Whether a call that is not open was never submitted, as far as this manager knows."""
    number = id >> CLIENT_SHIFT
    client = state.clients_by_number.get(number)
    if client is None:
        return number not in state.departed
    return client.unnamed is not None or id > client.last_call


def take_orphan(manager: Manager, library: Library, id: CallId) -> None:
    """A library runs a call that the manager has never heard of: it goes on, and its client will submit it again."""
    holding.occupy(library, id)
    manager.state.orphans[id] = Orphan(library)
    manager.state.notice(JOURNAL_LOST)


def claim(manager: Manager, fresh: list[Call]) -> list[Call]:
    """Of calls that have just come, those that are orphans go on where they run, or end. Returns the others."""
    orphans, rest = manager.state.orphans, []
    for call in fresh:
        orphan = orphans.pop(call.id, None)
        if orphan is None or not _goes_on(manager, orphan, call):
            rest.append(call)
    return rest


def _goes_on(manager: Manager, orphan: Orphan, call: Call) -> bool:
    library = orphan.library
    if orphan.end is not None:
        call.note(manager.state.now, "it had ended before its client could submit it again")
        ending.end(manager, call, orphan.end, waits=False)
        return True
    if manager.state.libraries.get(library.id) is not library or call.id not in library.zombies:
        return False
    if not holding.may_go_on(library, call):
        _drop(manager, library, call.id, running=call.group.options.gang[1] > 1)
        return False
    holding.resume(manager, library, call, why="it ran there while the manager did not know of it: it goes on")
    return True


def end_orphan(state: State, outcome: CallEnd) -> bool:
    """Keep the end of an orphan until its client submits it again. False if the call is none."""
    orphan = state.orphans.get(outcome.call)
    if orphan is not None:
        orphan.end = outcome
    return orphan is not None


def orphan_failed(state: State, id: CallId) -> None:
    """The infrastructure failed a call, which is no end: if it is an orphan, it runs when its client submits it."""
    state.orphans.pop(id, None)


def _drop(manager: Manager, library: Library, id: CallId, *, running: bool) -> None:
    if manager.state.libraries.get(library.id) is library and id in library.zombies:
        holding.drop(manager, library, id, running=running, of_gang=running)


# ---- pilots


def note_numbers(state: State, message: PilotHello) -> None:
    """Give no number again that this pilot knows a library by."""
    known = max((facts.library for facts in message.libraries), default=0)
    libraries.number_is_known(state, max(known, message.last_library))


def adopt(manager: Manager, pilot: Pilot, facts: LibraryFacts, message: PilotHello) -> Library | None:
    """Take a library that the manager does not know for its own; None if that cannot be."""
    state = manager.state
    devices = tuple(pilot.devices[id] for id in dict.fromkeys(facts.devices) if id in pilot.devices)
    context = _context(manager, facts.recipe, message)
    taken = facts.library in state.libraries
    if state.ending or taken or context is None or not devices or len(devices) != len(facts.devices):
        return None
    library = Library(LibraryId(facts.library), context, pilot, devices, 0, state.now)
    libraries.uses(library, memory_bytes=facts.memory_bytes, device_bytes=facts.device_bytes, now=state.now)
    try:
        libraries.found(manager, library, reserved_bytes=facts.reserved_bytes, is_hot=facts.ready)
    except PolicyError:
        return None
    if facts.ready:
        blocks.proved(manager, pilot)
    manager.state.notice(JOURNAL_LOST)
    return library


def _context(manager: Manager, key: RecipeKey, message: PilotHello) -> Context | None:
    known = manager.state.contexts.get(key)
    if known is not None:
        return known
    recipe = next((recipe for recipe in message.recipes if recipe.key == key), None)
    return registry.define_context(manager, recipe) if recipe is not None else None
