from __future__ import annotations

import os
import random
import signal
import time

import pytest
from fake_manager import FakeManager, function, recipe

from stoker.contexts import payloads
from stoker.protocol.calls import CallSpec
from stoker.protocol.to_manager import CallsEnded, CallsReturned, LibraryGone
from stoker.protocol.to_pilot import CancelCalls, RunCalls, StopLibrary, TakeBack


def _work(seconds: float) -> float:
    if seconds < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)
    return seconds


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
    """Under random orders, returns, cancellations, stops and deaths. Calls for an ended library are refused."""
    chance, blob, made = random.Random(slots), function(_work), recipe(slots=slots)
    sent: dict[int, set[int]] = {}
    cancelled: set[int] = set()
    current = number = 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until or len(sent) < 2 or len(served.ends()) <= 60:
        if current not in sent or any(type(m) is LibraryGone and m.library == current for m in served.said):
            current += 1
            sent[current] = set()
            served.ready(made, library=current)
        calls = []
        for _ in range(chance.randrange(1, 40)):
            number += 1
            odds = chance.random()
            seconds = -1.0 if odds < 0.004 else 0.04 if odds < 0.02 else 0.002 if odds < 0.1 else 0.0
            calls.append(CallSpec(number, payloads.dumps(((seconds,), {}))))
        sent[current].update(spec.call for spec in calls)
        served.send(RunCalls(current, blob.key, calls, function_blob=blob))
        if chance.random() < 0.3:
            served.send(TakeBack(current, chance.randrange(1, 20)))
        if chance.random() < 0.1:
            one = chance.choice(sorted(sent[current]))
            cancelled.add(one)
            served.send(CancelCalls(current, (one,)))
        if chance.random() < 0.02:
            served.send(StopLibrary(current, "test", drain=chance.random() < 0.7))
        while served.receive(chance.choice([0, 0, 0.005])):
            pass
    served.send(StopLibrary(current, "test"))
    for library, calls_of in sent.items():
        served.gone(library)
        served.until(lambda: calls_of <= set(_left(served, library)), what="all calls to leave")  # noqa: B023
    served.settle()
    gone: set[int] = set()
    for message in served.said:
        if type(message) is LibraryGone:
            gone.add(message.library)
            assert len(message.running) <= slots
        elif type(message) is CallsEnded:
            assert message.library not in gone
            assert all(end.ok for end in message.ends)
    for library, calls_of in sent.items():
        left = _left(served, library)
        assert set(left) == calls_of
        twice = {call for call in left if left.count(call) > 1}
        assert twice <= cancelled, "cancelling a call that has already left is answered too"
