from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from faults.world import until
from lazily import lazily
from polling import PATIENCE_S
from tiny_encoder import load_encoder, load_recipe, write_tiny_encoder
from tiny_model import write_tiny_model

from stoker.contexts import ambient, causal_lm
from stoker.contexts.ambient import Evicted, StopRequest, is_caused_by_eviction

torch = lazily("torch", needs="transformers")
LONG = {"max_new_tokens": 1_900}
SEEN = 3
"""The model pass during which the call is stopped."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["continuous", "static"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, ends=False, layers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SNAPSHOTS", str(tmp_path_factory.mktemp("snapshots")))
        return load_recipe(causal_lm(folder, engine=request.param))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_encoder(write_tiny_encoder(tmp_path_factory.mktemp("encoders") / "tiny"))


class RunningCall(threading.Thread):
    def __init__(self, work: Callable[[], Any], *, in_thread: bool = False) -> None:
        super().__init__(daemon=True)
        self.stop = StopRequest()
        self.raised: BaseException | None = None
        self.result: Any = None
        self._work = work
        self._in_thread = in_thread
        self.start()

    def run(self) -> None:
        ambient.enter_call_scope(stop=self.stop)
        try:
            if self._in_thread:  # user code may use its own threads
                worker = threading.Thread(target=self._run)
                worker.start()
                worker.join()
            else:
                self._run()
        finally:
            ambient.leave_call_scope()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.raised = error

    def ended(self) -> BaseException | None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        return self.raised


@pytest.fixture(scope="module")
def alone(model: Any) -> str:
    return "".join(model.stream("xyz", max_new_tokens=100))


@pytest.mark.parametrize(
    ("work", "in_thread"),
    [
        (lambda model: model.generate(["a", "bc", "def"], **LONG), False),
        (lambda model: model.generate(["a", "bc", "def"], batch_size=2, **LONG), False),
        (lambda model: list(model.stream("abc", **LONG)), False),
        (lambda model: model.complete("abc", **LONG), True),
    ],
    ids=["generate", "generate in batches", "stream", "complete"],
)
def test_requests_of_a_stopped_call_leave_and_other_requests_run(
    model: Any, alone: str, work: Any, in_thread: bool
) -> None:
    def open_requests() -> int:
        load = model.batch_load()
        return int(load.running + load.waiting)

    other = model.stream("xyz", max_new_tokens=100)
    written = [next(other)]
    call = RunningCall(lambda: work(model), in_thread=in_thread)
    if model.engine == "static":  # the next batch starts when this batch ends
        written += other
    until(open_requests, why="the call's requests are in the engine")
    call.stop.request()
    assert isinstance(call.ended(), Evicted)
    written += other
    assert "".join(written) == alone
    until(lambda: not open_requests(), why="the call's requests have left the engine")


def test_unread_stream_of_a_stopped_call_leaves_the_engine(model: Any) -> None:
    """The call is stopped while its function waits for an event and does not read its stream."""
    kept: list[Any] = []
    told = threading.Event()

    def work() -> None:
        kept.append(model.stream("abc", **LONG))
        next(kept[0])
        told.wait(PATIENCE_S)
        next(kept[0])

    call = RunningCall(work)
    until(lambda: model.batch_load().running == 1, why="the call's request runs")
    call.stop.request()
    until(lambda: model.batch_load().running == 0, why="the request has left the engine while the function waits")
    told.set()
    assert isinstance(call.ended(), Evicted)


def test_stopped_call_starts_no_further_request(model: Any, embedder: Any) -> None:
    steps = model.batch_load().steps
    for ask in (
        lambda: model.generate(["a"]), lambda: model.complete("a"), lambda: list(model.stream("a")),
        lambda: model.label_scores(["a"], ["b"]), lambda: embedder.embed(["paris"]),
    ):  # fmt: skip
        call = RunningCall(lambda ask=ask: (ambient.current_stop_request().request(), ask()))  # type: ignore[misc]
        assert isinstance(call.ended(), Evicted)
    assert model.batch_load().steps == steps


@contextmanager
def stops_in_a_pass(model: Any, calls: list[RunningCall]) -> Iterator[list[int]]:
    """Stop the last call during a forward pass of a Transformers model. Return the list of passes."""
    passes: list[int] = []

    def count(*_: Any) -> None:
        passes.append(1)
        if len(passes) == SEEN:
            calls[-1].stop.request()

    hook = model.register_forward_pre_hook(count)
    yield passes
    hook.remove()


def test_label_scoring_stops_after_the_running_pass(model: Any) -> None:
    model.label_scores(["warm"], [" a", " bc"])
    begun, calls = threading.Event(), list[RunningCall]()

    def work() -> Any:
        begun.wait(PATIENCE_S)
        return model.label_scores([f"prompt {n}" for n in range(500)], [" a", " bc"])

    with stops_in_a_pass(model.model, calls) as passes:
        calls.append(RunningCall(work))
        begun.set()
        assert isinstance(calls[0].ended(), Evicted)
        assert len(model.label_scores(["after"], [" a"])) == 1  # the call waits until the engine thread is free
        assert len(passes) == SEEN + 1


@pytest.mark.parametrize("leads", [True, False], ids=["one that computes", "one that waits"])
def test_embedding_stops_after_the_running_batch(embedder: Any, leads: bool) -> None:
    begun, calls = threading.Event(), list[RunningCall]()

    def work() -> Any:
        begun.wait(PATIENCE_S)
        return embedder.embed(["paris lies"] * 60, batch_size=1)

    with stops_in_a_pass(embedder.model, calls) as passes:
        calls += [RunningCall(work) for _ in range(1 if leads else 2)]
        begun.set()
        assert isinstance(calls[-1].ended(), Evicted)
        if leads:
            assert len(passes) == SEEN
        else:
            assert calls[0].ended() is None
            assert len(calls[0].result) == 60
    # this caller becomes the leader that computes the batches of all callers
    assert len(embedder.embed(["paris"])) == 1


def test_call_that_waits_for_exclusive_model_access_can_be_stopped(model: Any) -> None:
    holds, may_leave = threading.Event(), threading.Event()

    def hold() -> None:
        with model.alone():
            holds.set()
            may_leave.wait(PATIENCE_S)

    holder = RunningCall(hold)
    assert holds.wait(PATIENCE_S)

    def wait() -> None:
        with model.alone():
            raise AssertionError("the holder has it")

    call = RunningCall(wait)
    call.stop.request()
    assert isinstance(call.ended(), Evicted)
    may_leave.set()
    assert holder.ended() is None
    assert model.complete("a", max_new_tokens=1).text


def test_eviction_is_found_in_the_exception_of_a_task_group() -> None:
    tasks = BaseExceptionGroup("tasks", [BaseExceptionGroup("inner", [Evicted()])])
    assert is_caused_by_eviction(tasks)
    assert not is_caused_by_eviction(BaseExceptionGroup("others", [KeyError(1), ValueError(2)]))
