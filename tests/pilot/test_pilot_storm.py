from __future__ import annotations

import os
import random
import signal
import time

import pytest
from fake_manager import FakeManager, function, recipe

from stoker.contexts import payloads
from stoker.protocol.calls import CallSpec
from stoker.protocol.to_manager import CallsEnded, CallsReturned, LibraryGone, LibraryReady
from stoker.protocol.to_pilot import CancelCalls, RunCalls, StopLibrary, TakeBack


def _work(seconds: float) -> float:
    if seconds < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)
    return seconds


def _pid() -> int:
    return os.getpid()


def _left(manager: FakeManager, library: int) -> list[int]:
    left: list[int] = []
    for message in manager.said:
        if getattr(message, "library", None) != library:
            continue
        if type(message) is LibraryGone:
            left += [*message.running, *message.unstarted]
        elif type(message) is CallsEnded:
            left += [end.call for end in message.ends]
        elif type(message) is CallsReturned:
            left += message.calls
    return left


@pytest.mark.parametrize("slots", [1, 3])
def test_every_call_leaves_once(served: FakeManager, slots: int) -> None:
    chance = random.Random(slots)
    blob = function(_work)
    made = recipe(slots=slots)
    sent: dict[int, set[int]] = {}
    libraries = 0
    number = 0
    cancelled: set[int] = set()
    current = 0
    until = time.monotonic() + 1.5
    while time.monotonic() < until or libraries < 2 or len(served.ends()) <= 100:
        if current not in sent or any(type(m) is LibraryGone and m.library == current for m in served.said):
            libraries += 1
            current = libraries
            sent[current] = set()
            served.ready(made, library=current)
        calls = []
        for _ in range(chance.randrange(1, 40)):
            number += 1
            odds = chance.random()
            seconds = -1.0 if odds < 0.002 else 0.04 if odds < 0.02 else 0.002 if odds < 0.1 else 0.0
            calls.append(CallSpec(number, payloads.dumps(((seconds,), {}))))
        sent[current].update(spec.call for spec in calls)
        served.send(RunCalls(current, blob.key, calls, function_blob=blob))
        if chance.random() < 0.3:
            served.send(TakeBack(current, chance.randrange(1, 20)))
        if chance.random() < 0.1:
            (one,) = chance.sample(sorted(sent[current]), 1)
            cancelled.add(one)
            served.send(CancelCalls(current, (one,)))
        if chance.random() < 0.02:
            served.send(StopLibrary(current, "test", drain=chance.random() < 0.7))
        while served.receive(chance.choice([0, 0, 0.005])):
            pass
    served.send(StopLibrary(current, "test"))
    for library in sent:
        served.gone(library)
    # Calls for a library that had already ended are refused.
    served.until(
        lambda: all(calls <= set(_left(served, library)) for library, calls in sent.items()), what="all calls to leave"
    )
    while served.receive(0.5):
        pass
    gone: set[int] = set()
    for message in served.said:
        if isinstance(message, LibraryReady):
            continue
        if type(message) is LibraryGone:
            gone.add(message.library)
            assert len(message.running) <= slots
        elif type(message) is CallsEnded:
            assert message.library not in gone
            assert all(end.ok for end in message.ends)
    for library, calls in sent.items():
        here = _left(served, library)
        assert set(here) == calls
        twice = [call for call in set(here) if here.count(call) > 1]
        assert set(twice) <= cancelled  # cancelling a call that has already left is answered too
    assert libraries > 1
    assert len(served.ends()) > 100
