"""What leaves at the end of an event: calls to libraries, orders to drop some, and ends of calls to clients."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

from stoker.manager.core import printing
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Group, Library
from stoker.protocol import to_client
from stoker.protocol.calls import CallSpec
from stoker.protocol.to_pilot import CancelCalls, FunctionBlob, RunCalls

_GROUP = attrgetter("group")


def calls(manager: Manager) -> None:
    """Send libraries the calls that they were given, one message for those of one group."""
    sends, manager.sends = manager.sends, {}
    for library, given in sends.items():
        if not given:
            continue
        group = given[0].group
        specs = [call.spec for call in given if call.group is group]  # the hot path: nearly always all of them
        if len(specs) == len(given):
            _send(manager, library, group, specs)
        else:
            for group, some in groupby(given, _GROUP):
                _send(manager, library, group, [call.spec for call in some])


def _send(manager: Manager, library: Library, group: Group, specs: list[CallSpec]) -> None:
    blob = blob_for(library, group)
    manager.say(library.pilot, RunCalls(library.id, group.function.key, specs, group.options, blob))
    printing.sent(manager, library)


def blob_for(library: Library, group: Group) -> FunctionBlob | None:
    """The function of these calls, if the library has not been sent it."""
    function = group.function
    if function.key in library.functions:
        return None
    library.functions.add(function.key)
    return function


def lost_function(library: Library, group: Group) -> None:
    """A library has lost the function of these calls: it is sent again."""
    library.functions.discard(group.function.key)


def lost_functions(library: Library) -> None:
    """A library may have lost functions that it was sent: each is sent again."""
    library.functions.clear()


def drops(manager: Manager) -> None:
    """Tell libraries which calls to drop."""
    for (library, running, grace_s), dropped in manager.drops.items():
        manager.say(library.pilot, CancelCalls(library.id, tuple(dropped), running, grace_s))
    manager.drops.clear()


def results(manager: Manager) -> None:
    """Number the ends that wait for their clients, and send them to those that are connected."""
    results, manager.results = manager.results, {}
    for client, ends in results.items():
        if not ends:
            continue
        first = client.first_unacked + len(client.unacked)
        client.unacked.extend(ends)
        if client.connected and client.unnamed is None:
            manager.tell(client, to_client.Results(first, ends))
