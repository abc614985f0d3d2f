"""Random events for the pure parts of the manager and of the pilot.

The manager's core takes every event of the right types; the pilot's parts raise what they declare, have then changed
nothing, and their books add up.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from benchmarks.reliability import fuzz_manager, fuzz_pilot
from stoker.contexts.recipe import BARE
from stoker.pilot.core import holding, lifecycle
from stoker.pilot.core.health import DeviceHealth, ProbeVerdict
from stoker.pilot.core.ledger import Ledger
from stoker.pilot.core.stages import Stage
from stoker.pilot.core.state import PilotLibrary
from stoker.pilot.core.turns import FirstCome
from stoker.protocol.ids import CallId, DeviceId, LibraryId
from stoker.protocol.to_pilot import StartLibrary

EVENTS = 200
"""Events of one life."""
_SIZES = (-1, 0, 1, 10, 50, 99, 100, 101, 2**63)


def lives() -> dict[str, Callable[[random.Random], None]]:
    """Each gets chance, and lives through `EVENTS` random events. Raises AssertionError when a promise is broken."""
    return {
        "manager core: every message": functools.partial(fuzz_manager.live, events=EVENTS),
        "pilot core: every event": functools.partial(fuzz_pilot.live, count=EVENTS),
        "pilot core: ledger": _ledger,
        "pilot core: library": _library,
        "pilot core: turns": _turns,
        "pilot core: health": _health,
    }


def _ledger(chance: random.Random) -> None:
    devices = {DeviceId(f"cuda:{number}"): 100 for number in range(3)}
    ledger = Ledger(devices)
    names = [*devices, DeviceId("cuda:9")]
    for _ in range(EVENTS):
        library = LibraryId(chance.randrange(5))
        before = [ledger.free(device) for device in devices], ledger.held(library)
        try:
            match chance.randrange(3):
                case 0:
                    some = tuple(chance.choices(names, k=chance.randrange(4)))
                    ledger.reserve(library, devices=some, memory_bytes=chance.choice(_SIZES))
                case 1:
                    ledger.resize(library, memory_bytes=chance.choice(_SIZES))
                case _:
                    ledger.release(library)
        except ValueError:
            assert before == ([ledger.free(device) for device in devices], ledger.held(library)), "it changed something"
        ledger.validate()


def _library(chance: random.Random) -> None:
    library = PilotLibrary(StartLibrary(LibraryId(1), BARE, (DeviceId("cpu:0"),)), 0.0)
    inside: set[CallId] = set()
    left: list[CallId] = []
    fresh = 0
    for _ in range(EVENTS):
        some = [CallId(chance.randrange(fresh + 3)) for _ in range(chance.randrange(4))]
        was = library.stage
        try:
            match chance.randrange(5):
                case 0:
                    lifecycle.move(library, chance.choice([each for each in Stage if each is not Stage.GONE]))
                case 1:
                    new = [CallId(fresh + number) for number in range(chance.randrange(4))]
                    holding.hold(library, new, limit_s=chance.choice([0.0, 5.0]))
                    fresh += len(new)
                    inside.update(new)
                case 2:
                    left += holding.ended(library, some)
                case 3:
                    left += holding.returned(library, some)
                case _ if chance.random() < 0.03:
                    if library.stage is not Stage.GONE:
                        lifecycle.move(library, Stage.GONE)
                    gone = holding.depart(library, some)
                    left += [*gone.running, *gone.unstarted]
        except ValueError:
            assert library.stage is was, "it changed something"
        assert len(left) == len(set(left)), "a call left twice"
        assert set(left) | set(library.held) == inside, "a call was lost, or came from nowhere"
        assert not set(left) & set(library.held), "a call left and is still held"


def _turns(chance: random.Random) -> None:
    turns: FirstCome[int] = FirstCome()
    waiting: list[int] = []
    for number in range(EVENTS):
        match chance.randrange(4):
            case 0 | 1:
                turns.add(number, -number)
                waiting.append(number)
            case 2:
                taken = turns.take()
                assert taken == ((waiting[0], -waiting[0]) if waiting else None), "not the oldest"
                del waiting[:1]
            case _ if chance.random() < 0.5:
                count = chance.randrange(-1, 5)
                back = turns.give_back(count)
                assert back == waiting[::-1][: max(0, count)], "not the newest"
                del waiting[len(waiting) - len(back) :]
            case _:
                some = [chance.randrange(EVENTS) for _ in range(5)]
                assert set(turns.drop(some)) == set(some) & set(waiting), "dropped others"
                waiting = [each for each in waiting if each not in some]
        assert len(turns) == len(waiting)


def _health(chance: random.Random) -> None:
    health = DeviceHealth()
    lasting = False
    for _ in range(EVENTS):
        before = health.fault
        if chance.random() < 0.02:
            changed = health.reported("Xid 79")
            lasting = True
        else:
            answer = chance.choice([*ProbeVerdict, ProbeVerdict.SOUND, ProbeVerdict.SOUND])
            changed = health.heard(answer, "refused memory")
        assert changed == (health.fault != before), "it did not say what changed"
        assert not (lasting and before and not health.fault), "a fault of the driver went away by itself"
