"""The core's commands, each with what carries it out."""

from __future__ import annotations

import logging
from typing import assert_never

from stoker.pilot.agent import objects, observing, payloads, probing, processes, snapshots
from stoker.pilot.agent.agent import Agent
from stoker.pilot.cache import snapshot_names
from stoker.pilot.core.commands import (
    Acknowledged,
    Beat,
    BringArguments,
    Command,
    Expect,
    Fetch,
    Forget,
    Greet,
    HandIn,
    KillProcess,
    KillZygote,
    Leave,
    Log,
    Observe,
    OfferSnapshot,
    Pin,
    Prepare,
    Probe,
    ReleaseArguments,
    SetTimer,
    StartProcess,
    StopFetch,
    Tell,
    TellLibrary,
    TidySnapshots,
)

log = logging.getLogger("stoker.pilot")


def carry_out(agent: Agent, command: Command) -> None:
    """Do what the core wants done."""
    match command:
        case Tell(message=message):
            agent.link.post(message)
        case TellLibrary(library=number, message=to_library):
            process = agent.processes.get(number)
            if process is not None:
                agent.wires.tell(process, to_library)
        case Acknowledged(sequence=sequence):
            agent.link.acked(sequence)
        case Log(text=text, severity=severity):
            log.log(severity, "%s", text)
        case Prepare(ordered=ordered):
            processes.prepare(agent, ordered)
        case Pin(library=number, objects=refs):
            objects.pin(agent, number, refs)
        case StartProcess(ordered=ordered, objects=paths):
            processes.start(agent, ordered, dict(paths))
        case KillProcess(library=number):
            processes.kill(agent, number)
        case KillZygote(library=number):
            processes.kill_zygote(agent, number)
        case Forget(library=number, ran=ran):
            processes.forget(agent, number, ran)
        case Observe(library=number):
            observing.observe(agent, number)
        case Expect(name=name):
            agent.peers.shelf.expect(name)
        case Fetch(order=order):
            agent.fetches.order(order)
        case StopFetch(name=name):
            agent.fetches.stop(name)
        case TidySnapshots():
            snapshot_names.tidy(agent.cache)
        case BringArguments():
            payloads.bring(agent, command)
        case ReleaseArguments(library=number, calls=calls):
            payloads.release(agent, number, calls)
        case HandIn(library=number, ends=ends):
            payloads.hand_in(agent, number, ends)
        case OfferSnapshot(recipe=recipe, made=made):
            snapshots.offer(agent, recipe, made)
        case Probe(device=device):
            probing.begin(agent, device)
        case SetTimer(at=at, key=key):
            agent.timers.set(at, key)
        case Beat(message=heartbeat):
            agent.link.say(heartbeat)
        case Greet(hello=hello):
            agent.link.greet(hello)
        case Leave():
            agent.is_over = True
        case _:
            assert_never(command)
