"""What a client has to say, as frames."""

from __future__ import annotations

from stoker.contexts.recipe import BARE
from stoker.manager.executor.outgoing import Job, Outgoing
from stoker.manager.live.doors import FRAME_LIMIT_BYTES
from stoker.manager.protocol import to_manager, wire
from stoker.manager.protocol.calls import CallOptions, CallSpec
from stoker.manager.protocol.ids import CallId, FunctionKey
from stoker.manager.protocol.to_pilot import FunctionBlob

LARGE = 20_000_000
JOB = Job(FunctionBlob(FunctionKey("f"), "f", b"code"), BARE, CallOptions())


def calls_of(frame: bytes) -> list[int]:
    messages = wire.from_client()(frame).messages
    return [spec.call for message in messages if isinstance(message, to_manager.Submit) for spec in message.calls]


def test_what_comes_while_frames_leave_waits_for_the_next_time() -> None:
    out = Outgoing(range(10_000), describe=lambda _: [])  # type: ignore[arg-type]
    out.queue.extend((JOB, CallSpec(CallId(n), b"")) for n in range(3))
    frames = []
    for frame in out.frames(0.0):
        frames.append(calls_of(frame))
        out.queue.append((JOB, CallSpec(CallId(100 + len(frames)), b"")))  # as another thread does, when one leaves
        assert len(frames) < 10
    assert frames == [[0, 1, 2]]
    out.queue.append((JOB, CallSpec(CallId(5), b"")))
    assert [calls_of(frame) for frame in out.frames(0.0)] == [[101, 5]]


def test_more_than_a_frame_holds_leaves_in_several() -> None:
    out = Outgoing(range(10_000), describe=lambda _: [])  # type: ignore[arg-type]
    out.queue.extend((JOB, CallSpec(CallId(n), b"")) for n in range(4500))
    assert [len(calls_of(frame)) for frame in out.frames(0.0)] == [2000, 2000, 500]


def test_large_functions_leave_one_by_one_in_frames_that_a_manager_takes() -> None:
    jobs = [Job(FunctionBlob(FunctionKey(f"f{n}"), "f", bytes(LARGE)), BARE, CallOptions()) for n in range(5)]
    out = Outgoing(range(100), describe=lambda _: [])  # type: ignore[arg-type]
    out.queue.extend((jobs[n % 5], CallSpec(CallId(n), b"")) for n in range(10))
    frames = list(out.frames(0.0))
    assert max(map(len, frames)) < FRAME_LIMIT_BYTES
    assert [call for frame in frames for call in calls_of(frame)] == list(range(10))
    defined: set[str] = set()
    for frame in frames:
        for message in wire.from_client()(frame).messages:
            if isinstance(message, to_manager.DefineFunction):
                assert message.key not in defined
                defined.add(message.key)
            if isinstance(message, to_manager.Submit):
                assert message.function in defined
