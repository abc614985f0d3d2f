"""Real libraries with engines stop a call for each possible reason, whatever the call does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_manager import FakeManager, recipe
from tiny_model import write_tiny_model

from stoker.contexts import causal_lm
from stoker.contexts.payloads import loads
from stoker.protocol.calls import WINDOW_PIECES, CallOptions, Failure, FailureKind
from stoker.protocol.to_manager import CallEvicted, CallYielded, LibraryGone
from stoker.protocol.to_pilot import AckPieces, CancelCalls, EvictCall

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("PyTorch or Transformers is not installed", allow_module_level=True)

WRITER, PLAIN = 1, 2


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeManager]:
    folder = tmp_path_factory.mktemp("pilot")
    write_tiny_model(folder / "writer", ends=False, ascii_only=True, layers=1)
    made = FakeManager(folder, lease_s=900)
    try:
        made.start_pilot("--devices", "cpu:2")
        made.hello()
        made.ready(causal_lm(folder / "writer"), library=WRITER, devices=("cpu:0",))
        made.ready(recipe(), library=PLAIN, devices=("cpu:1",))
        yield made
    finally:
        made.close()


# Each function loops, so that no call ends before its test stops it.


def generate(model: Any, begun: str) -> Any:
    open(begun, "w").close()
    return [model.generate(["a", "bc"], max_new_tokens=1_900) for _ in range(1_000)]


def complete(model: Any, begun: str) -> Any:
    """Yield one piece at the end, like the function of the gateway."""
    open(begun, "w").close()
    yield [model.complete("abc", max_new_tokens=1_900) for _ in range(1_000)]


def relayed(model: Any, begun: str) -> Any:
    """Yield more texts than fit in the window: the thread of the engine sends some texts, then the call waits."""
    open(begun, "w").close()
    for _ in range(100):
        yield model.stream_completion("abc", max_new_tokens=1_900).texts()


def careless(model: Any, begun: str) -> Any:
    """Retry after each exception; replace the stop of the call by another error, as user code may do."""
    open(begun, "w").close()
    try:
        for _ in range(10_000):
            try:
                model.complete("abc", max_new_tokens=1_900)
            except Exception:
                continue
    except BaseException as error:
        raise RuntimeError("the model does not answer") from error


def in_threads(model: Any, begun: str) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    open(begun, "w").close()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda text: model.complete(text, max_new_tokens=1_900).text, ["a", "bc"] * 500))


async def waits(begun: str) -> None:
    import asyncio

    open(begun, "w").close()
    await asyncio.sleep(3600)


def runs(model: Any, least: int) -> int:
    """Wait until the engine runs at least this number of requests."""
    import time

    while model.batch_load().running < least:
        time.sleep(0.01)
    return int(model.batch_load().running)


def idle(model: Any, most: int) -> int:
    """Wait until the engine has at most this number of requests."""
    import time

    while model.batch_load().running + model.batch_load().waiting > most:
        time.sleep(0.01)
    return int(model.batch_load().running)


CASES: dict[str, tuple[int, Callable[..., Any], int]] = {
    "generate": (WRITER, generate, 2),
    "complete": (WRITER, complete, 1),
    "relayed texts": (WRITER, relayed, 1),
    "careless": (WRITER, careless, 1),
    "in threads": (WRITER, in_threads, 1),
    "a coroutine": (PLAIN, waits, 0),
}


@pytest.mark.parametrize(
    ("case", "how"),
    [*((case, "cancel") for case in CASES), ("careless", "limit"), ("relayed texts", "limit"), ("complete", "evict")],
)
def test_call_stops_and_its_library_continues(pilot: FakeManager, tmp_path: Path, case: str, how: str) -> None:
    library, method, requests = CASES[case]
    begun = tmp_path / "begun"
    is_generator = method in (complete, relayed)
    options = CallOptions(stream=is_generator, limit_s=0.5 if how == "limit" else 0.0)
    takes_context = library != PLAIN
    (call,) = pilot.run(method, [(str(begun),)], library=library, options=options, takes_context=takes_context)
    pilot.until(begun.exists, what="the call runs")
    if requests and how != "limit":
        pilot.results(pilot.run(runs, [(requests,)], library=library, takes_context=True))
    if how == "cancel":
        pilot.send(CancelCalls(library=library, calls=(call,), running=True))  # type: ignore[arg-type]
    elif how == "evict":
        pilot.send(EvictCall(library=library, call=call))  # type: ignore[arg-type]
    if how == "limit":
        # The time limit excludes waits for the client, so the client reads all pieces.
        pilot.until(lambda: acknowledge(pilot, call) in pilot.ends(), what="the limit ends the call")
        (failure,) = pilot.results([call])
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.TIMEOUT
    else:
        pilot.until(lambda: has_left(pilot, call), what="the call has left")
    if library == WRITER:
        assert pilot.results(pilot.run(idle, [(0,)], library=library, takes_context=True)) == [0]
    assert not [message for message in pilot.said if isinstance(message, LibraryGone)]


def acknowledge(pilot: FakeManager, call: int) -> int:
    """Acknowledge all pieces of a call that have arrived; return the call."""
    pieces = [message for message in pilot.said if isinstance(message, CallYielded) and message.call == call]
    if pieces:
        upto = pieces[-1].first + len(pieces[-1].items)
        pilot.send(AckPieces(library=WRITER, call=call, run=pieces[-1].run, upto=upto, again=False))  # type: ignore[arg-type]
    return call


def has_left(pilot: FakeManager, call: int) -> bool:
    return any(isinstance(message, CallEvicted) and message.progress.call == call for message in pilot.said)


def relay(model: Any, most: int) -> Any:
    texts = model.stream_completion("abc", max_new_tokens=most).texts()
    yield "begins"
    yield texts
    yield texts.finish_reason, texts.tokens


@pytest.mark.parametrize("most", [10, WINDOW_PIECES + 50])
def test_relayed_model_texts_and_other_items_keep_their_order(pilot: FakeManager, most: int) -> None:
    def whole(model: Any) -> str:
        return str(model.complete("abc", max_new_tokens=most).text)

    (text,) = pilot.results(pilot.run(whole, [()], library=WRITER, takes_context=True))
    options = CallOptions(stream=True)
    (call,) = pilot.run(relay, [(most,)], library=WRITER, options=options, takes_context=True)
    pieces: dict[int, Any] = {}

    def collected() -> int:
        for message in pilot.said:
            if isinstance(message, CallYielded) and message.call == call:
                pieces.update((number, loads(item)) for number, item in enumerate(message.items, message.first))
                run[0] = message.run
        return len(pieces)

    def acknowledged() -> bool:
        upto = collected()
        pilot.send(AckPieces(library=WRITER, call=call, run=run[0], upto=upto, again=False))  # type: ignore[arg-type]
        return call in pilot.ends()

    run = [0]
    pilot.until(lambda: collected() >= min(most, WINDOW_PIECES), what="the window is full")
    pilot.until(acknowledged, what="the call has ended")
    first, *texts, last = [pieces[number] for number in range(len(pieces))]
    assert (first, "".join(texts), last) == ("begins", text, ("length", most))
    assert pilot.ends()[call].pieces == len(pieces)


def test_function_without_streaming_returns_model_texts_in_a_list(pilot: FakeManager) -> None:
    (found,) = pilot.results(pilot.run(relay, [(10,)], library=WRITER, takes_context=True))
    assert (found[0], found[-1]) == ("begins", ("length", 10))
    assert all(isinstance(text, str) for text in found[1:-1])
    assert len(found) > 3


def test_cancelling_calls_does_not_shorten_the_text_of_another_call(pilot: FakeManager, tmp_path: Path) -> None:
    def write(model: Any, begun: str) -> str:
        open(begun, "w").close()
        return str(model.complete("xyz", max_new_tokens=200).text)

    alone = pilot.results(pilot.run(write, [(str(tmp_path / "alone"),)], library=WRITER, takes_context=True))
    calls = [pilot.run(generate, [(str(tmp_path / str(n)),)], library=WRITER, takes_context=True)[0] for n in range(3)]
    pilot.results(pilot.run(runs, [(6,)], library=WRITER, takes_context=True))
    (other,) = pilot.run(write, [(str(tmp_path / "other"),)], library=WRITER, takes_context=True)
    pilot.until((tmp_path / "other").exists, what="the other call runs")
    pilot.send(CancelCalls(library=WRITER, calls=tuple(calls), running=True))  # type: ignore[arg-type]
    pilot.until(lambda: all(has_left(pilot, call) for call in calls), what="the calls have left")
    assert pilot.results([other]) == alone
    assert not [message for message in pilot.said if isinstance(message, LibraryGone)]
