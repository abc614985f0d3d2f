"""Compute a 32-bit checksum (a *check*) of the core's decisions about an event.

A check covers each command and its receiver, but no answers, acknowledgements, measurements or texts for people. It
contains ids and keys, and no user data. To limit the cost, it covers only parts of long messages. For calls to one
library: their number, the last call and a sample. For results: their number and the last result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import msgspec

from stoker.manager.core import events
from stoker.manager.core.events import Command, ToClient, ToPilot
from stoker.protocol import to_client, to_pilot
from stoker.protocol.blocks import ANYWHERE, BlockOrder
from stoker.protocol.to_client import Results
from stoker.protocol.to_pilot import RunCalls

_encode = msgspec.msgpack.Encoder().encode
_PartsFunction = Callable[[Any], tuple[object, ...]]
_SAMPLED_CALLS = 8


def _checked_order_parts(order: BlockOrder) -> tuple[object, ...]:
    place = order.allowed
    return order.block, order.source, *(() if place == ANYWHERE else (place.exclude, place.only))


CHECKED_PARTS: dict[type, _PartsFunction] = {
    to_pilot.StartLibrary: lambda m: (
        m.library, m.recipe.key, m.devices, m.memory_bytes, m.device_memory_bytes,
        [(form, ref.name) for form, ref in m.snapshots.items()], m.snapshot_wait_s,
    ),
    to_pilot.StopLibrary: lambda m: (m.library, m.drain),
    to_pilot.TakeBack: lambda m: (m.library, m.count),
    to_pilot.CancelCalls: lambda m: (m.library, m.calls, m.running),
    to_pilot.MeetGang: lambda m: ("meet", m.library, m.call, m.address),
    to_pilot.EvictCall: lambda m: (m.library, m.call),
    to_pilot.ResizeLibrary: lambda m: (m.library, m.device_memory_bytes),
    to_pilot.SleepLibrary: lambda m: ("sleep", m.library, m.device_memory_bytes, m.host_bytes),
    to_pilot.WakeLibrary: lambda m: ("wake", m.library, m.device_memory_bytes),
    to_pilot.FetchObject: lambda m: (m.object.name, [peer.pilot for peer in m.peers], m.origin, m.keep),
    to_pilot.PilotWelcome: lambda _: ("welcome",),
    to_pilot.PilotRefused: lambda _: ("refused",),
    to_pilot.HelloAgain: lambda _: ("hello again",),
    to_pilot.Exit: lambda m: ("exit", m.drain, m.hand_on_s),
    to_client.Rejected: lambda m: ("rejected", m.calls),
    to_client.SubmitBlocks: lambda m: ("submit", [_checked_order_parts(order) for order in m.orders]),
    to_client.CancelBlocks: lambda m: ("cancel", m.blocks),
    to_client.KnownBlocks: lambda m: ("known", [(block.block, block.source, block.phase) for block in m.blocks]),
    to_client.Forecasts: lambda m: ("forecasts", [(said.call, said.ends_at, said.in_time) for said in m.forecasts]),
    to_client.ClientWelcome: lambda m: ("welcome", m.number),
    to_client.ClientRefused: lambda _: ("refused",),
    to_client.SessionOver: lambda _: ("over",),
    events.SetTimer: lambda c: (c.at, c.key),
    events.AskAdvice: lambda c: ("advice", c.about),
    events.ClaimProbe: lambda c: ("claim", c.record.source, c.record.node),
    events.DiscardObject: lambda c: ("discard", c.path),
    events.EndManager: lambda _: ("end",),
}  # fmt: skip
"""By message or command type: function that returns the parts to checksum; not for RunCalls and Results."""


def decision_checksum(commands: Sequence[Command]) -> int:
    """Return the checksum of the commands for one event; 0 if no command needs a checksum."""
    said: list[object] = []
    for command in commands:
        if type(command) is ToPilot:
            message = command.message
            if type(message) is RunCalls:  # handled here for speed: a busy manager sends mostly RunCalls and Results
                calls = message.calls
                few = len(calls) <= _SAMPLED_CALLS
                some = [spec.call for spec in (calls if few else calls[:: 1 + len(calls) // _SAMPLED_CALLS])]
                said += command.pilot, message.library, message.function, len(calls), calls[-1].call, some
                if message.function_blob is not None or message.gang is not None or message.offer:
                    gang = message.gang and (message.gang.rank, message.gang.size)
                    said.append((message.function_blob is not None, gang, message.offer))
            elif (checked_parts := CHECKED_PARTS.get(type(message))) is not None:
                said.append((command.pilot, checked_parts(message)))
        elif type(command) is ToClient:
            answer = command.message
            if type(answer) is Results:
                ends = answer.ends
                said += command.client, answer.first, len(ends), ends[-1].call, ends[-1].ok
            elif (checked_parts := CHECKED_PARTS.get(type(answer))) is not None:
                said.append((command.client, checked_parts(answer)))
        elif (checked_parts := CHECKED_PARTS.get(type(command))) is not None:
            said.append(checked_parts(command))
    return crc32(_encode(said)) if said else 0
