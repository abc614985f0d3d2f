from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stoker.manager.core import actions
from stoker.manager.core.events import Command, Event
from stoker.manager.core.reactor import Core
from stoker.manager.core.seams import Action, Policies
from stoker.manager.live import snapshot
from stoker.manager.live.restore import list_policy_modules
from stoker.manager.policies import default_policies
from stoker.manager.sim.validate import check_state

SESSION = "k3v9"
MakePolicies = Callable[[], Policies]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[float, Event]]).decode


class Desk:
    """Send events to a strict core and validate its state after each event. `check` replays the events from
    the start and from a snapshot.
    """

    def __init__(
        self, policies: MakePolicies = default_policies, *, watch: frozenset[int] = frozenset(), validates: bool = True
    ) -> None:
        self._make = policies
        self._watch = watch
        self._validates = validates
        self.policies = policies()
        self.core = Core(SESSION, self.policies, strict=True, watch=watch)
        self.now = 0.0
        self.by_hand = False  # True if a test changed the core's state directly, so a replay is impossible
        self.past: list[tuple[float, Event]] = []
        self.did: list[list[Command]] = [self.core.start()]

    def give(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, self.now)
        self.past.append((self.now, event))
        self.did.append(commands)
        if self._validates:
            check_state(self.core.state)
        return commands

    def apply(self, plan: Sequence[Action], *, seam: str) -> None:
        """Carry out these actions as the plan of the policy `seam`."""
        actions.carry_out(self.core.manager, plan, seam=seam)

    def check(self) -> None:
        if self.by_hand:
            return
        again = Core(SESSION, self._make(), strict=True, watch=self._watch)
        assert again.start() == self.did[0]
        for number, ((now, event), did) in enumerate(zip(_decode(_encode(self.past)), self.did[1:], strict=True)):
            if number == len(self.past) // 2:
                again = restored(again)
            assert again.handle(event, now) == did
        assert picture(again) == picture(self.core)
        check_state(again.state)


def restored(core: Core) -> Core:
    file = io.BytesIO()
    modules = list_policy_modules(core.policies)
    layout = snapshot.write_object_graph(core, file, modules=modules)
    again = snapshot.read_object_graph(file.getvalue(), layout, modules=modules)
    assert isinstance(again, Core)
    assert picture(again) == picture(core)
    return again


def picture(core: Core) -> Any:
    """Return the important parts of a state in a comparable form."""
    state = core.state
    return {
        "calls": {
            id: (c.state, c.history and c.history.library_deaths, c.spec, c.sent_at, c.notes)
            for id, c in state.calls.items()
        },
        "queues": {k: [c.id for c in x.queue] for k, x in state.contexts.items()},
        "libraries": {
            id: (x.state, x.promised_bytes, list(x.held), x.withdrawn_calls, x.pilot.id)
            for id, x in state.libraries.items()
        },
        "pilots": {id: (p.state, p.inbox.last, list(p.libraries)) for id, p in state.pilots.items()},
        "clients": {id: (c.first_unacked, list(c.unacked)) for id, c in state.clients.items()},
        "counts": (state.done, state.failures, state.lost_pilots, state.rerun_calls, state.refused),
        "timers": state.timers,
        "waiting_contexts": list(state.waiting_contexts),
        "tiers": state.tier_seconds,
    }
