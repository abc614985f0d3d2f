from __future__ import annotations

from collections.abc import Callable
from typing import cast

from msgspec.structs import replace

from stoker.contexts.recipe import BARE, NO_LIMITS, LibraryLimits
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.futures import CallFuture
from stoker.manager.executor.outgoing import OpenCall, OutgoingFrames, ReplacedFunction, Submission
from stoker.manager.live.sockets import FRAME_LIMIT_BYTES
from stoker.protocol import to_manager, wire
from stoker.protocol.calls import CallOptions, CallSpec
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_pilot import FunctionBlob

LARGE = 20_000_000
SUBMISSION = Submission(FunctionBlob(FunctionKey("f"), "f", b"code"), BARE, CallOptions())


def outgoing() -> tuple[OutgoingFrames, Callable[..., OpenCall]]:
    """Return the outgoing queue and a function that adds a call to the queue."""
    calls: dict[CallId, OpenCall] = {}

    def opened(number: int, submission: Submission = SUBMISSION) -> OpenCall:
        calls[CallId(number)] = OpenCall(submission, CallSpec(CallId(number), b""), CallFuture(cast(ClientLink, None)))
        return calls[CallId(number)]

    return OutgoingFrames(calls, create_manifests=lambda _: []), opened


def calls_of(frame: bytes) -> list[int]:
    messages = wire.from_client_decoder()(frame).messages
    return [spec.call for message in messages if isinstance(message, to_manager.Submit) for spec in message.calls]


def test_frames_added_during_sending_wait_for_the_next_send() -> None:
    out, opened = outgoing()
    out.queue.extend(opened(n) for n in range(3))
    frames = []
    for frame in out.encode_queued_frames(0.0):
        frames.append(calls_of(frame))
        out.queue.append(opened(100 + len(frames)))  # another thread may add a call while a frame is sent
        assert len(frames) < 10
    assert frames == [[0, 1, 2]]
    out.queue.append(opened(5))
    assert [calls_of(frame) for frame in out.encode_queued_frames(0.0)] == [[101, 5]]


def test_many_queued_calls_are_split_into_several_frames() -> None:
    out, opened = outgoing()
    out.queue.extend(opened(n) for n in range(4500))
    assert [len(calls_of(frame)) for frame in out.encode_queued_frames(0.0)] == [2000, 2000, 500]


def test_frames_with_large_functions_stay_below_the_size_limit() -> None:
    submissions = [
        Submission(FunctionBlob(FunctionKey(f"f{n}"), "f", bytes(LARGE)), BARE, CallOptions()) for n in range(5)
    ]
    out, opened = outgoing()
    out.queue.extend(opened(n, submissions[n % 5]) for n in range(10))
    frames = list(out.encode_queued_frames(0.0))
    assert max(map(len, frames)) < FRAME_LIMIT_BYTES
    assert [call for frame in frames for call in calls_of(frame)] == list(range(10))
    defined: set[str] = set()
    for frame in frames:
        for message in wire.from_client_decoder()(frame).messages:
            if isinstance(message, to_manager.DefineFunction):
                assert message.key not in defined
                defined.add(message.key)
            if isinstance(message, to_manager.Submit):
                assert message.function in defined


def test_unused_function_is_reported_and_defined_again_on_use() -> None:
    submissions = [Submission(FunctionBlob(FunctionKey(f"f{n}"), "f", b"code"), BARE, CallOptions()) for n in range(2)]
    out, opened = outgoing()

    def leaves(*entries: object) -> list[str]:
        out.queue.extend(entries)
        said = []
        for frame in out.encode_queued_frames(0.0):
            for message in wire.from_client_decoder()(frame).messages:
                match message:
                    case to_manager.DefineFunction(key=key):
                        said.append(f"define {key}")
                    case to_manager.Submit(function=key):
                        said.append(f"call {key}")
                    case to_manager.Received(unused=keys):
                        said += [f"unused {key}" for key in keys]
        return said

    gone = ReplacedFunction(submissions[0].function.key, new_function=submissions[1].function.key)
    old, new = (opened(n, submission) for n, submission in enumerate(submissions))
    assert leaves(old, gone, new) == ["define f0", "call f0", "define f1", "call f1", "unused f0"]
    # a late call: made before the message that its function is unused, and sent after that message
    for late in (old, (gone, old)):
        assert leaves(*(late if late is not old else [late])) == ["define f0", "call f0", "unused f0"]
    assert leaves(old, new, old) == ["define f0", "call f0", "call f1", "call f0", "unused f0"]
    assert leaves(gone) == []
    assert leaves(new) == ["call f1"]
    back = ReplacedFunction(submissions[1].function.key, new_function=submissions[0].function.key)
    assert leaves(back, old) == ["define f0", "call f0", "unused f1"]
    assert leaves(old) == ["call f0"]  # the function is used again and stays defined


DUE_AT = 160.0
TIMED = Submission(FunctionBlob(FunctionKey("f"), "f", b"code"), BARE, CallOptions(), due_at=DUE_AT)


def seconds_left(frame: bytes) -> list[float | None]:
    messages = wire.from_client_decoder()(frame).messages
    return [message.due_in_s for message in messages if isinstance(message, to_manager.Submit)]


def timed(*submissions: Submission) -> tuple[OutgoingFrames, Callable[..., OpenCall]]:
    out, opened = outgoing()
    out.queue.extend(opened(n, submission) for n, submission in enumerate(submissions))
    return out, opened


def test_resent_frame_differs_only_in_seconds_left() -> None:
    out, opened = timed(TIMED, SUBMISSION)
    [frame] = out.encode_queued_frames(100.0)
    out.queue.append(opened(7))
    [other] = out.encode_queued_frames(110.0)
    again = out.unacknowledged_frames(130.0)
    assert [seconds_left(each) for each in again] == [[30.0, None], [None]]
    assert (again[1], out.unacknowledged_frames(100.0)) == (other, [frame, other])
    assert out.unacknowledged_frames(200.0)[0] != again[0], "each time it is counted from the first"
    assert seconds_left(out.unacknowledged_frames(200.0)[0]) == [-40.0, None]
    read = wire.from_client_decoder()
    assert (read(again[0]).sequence, calls_of(again[0])) == (read(frame).sequence, calls_of(frame))


def test_acknowledged_call_with_a_deadline_is_not_sent_again() -> None:
    out, opened = timed(TIMED)
    list(out.encode_queued_frames(100.0))
    out.queue.append(opened(7, TIMED))
    list(out.encode_queued_frames(120.0))
    assert out.has_unacknowledged
    out.handle_ack(1)
    assert [seconds_left(each) for each in out.unacknowledged_frames(130.0)] == [[30.0]]
    out.handle_ack(2)
    assert not out.unacknowledged_frames(130.0)
    assert not out.has_unacknowledged


def test_changed_limits_of_a_context_are_sent_to_the_manager() -> None:
    out, opened = outgoing()
    few, more = LibraryLimits(most=1), LibraryLimits(most=2)

    def defines(limits: LibraryLimits, number: int) -> list[LibraryLimits]:
        submission = Submission(SUBMISSION.function, replace(BARE, limits=limits), CallOptions())
        out.queue.append(opened(number, submission))
        messages = [
            message for frame in out.encode_queued_frames(0.0) for message in wire.from_client_decoder()(frame).messages
        ]
        return [each.recipe.limits for each in messages if isinstance(each, to_manager.DefineRecipe)]

    said = [defines(each, number) for number, each in enumerate((NO_LIMITS, few, few, NO_LIMITS, few, more))]
    assert said == [[NO_LIMITS], [few], [], [NO_LIMITS], [few], [more]], "also that they are taken back"
    out.resubmit_everything()
    assert defines(more, 7) == [NO_LIMITS, few, NO_LIMITS, few, more], "a manager that has lost it is told again"
