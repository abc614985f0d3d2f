from __future__ import annotations

import os
import threading
import time
from concurrent.futures import CancelledError, wait

import pytest
from faults.world import until
from parsl.dataflow.errors import DependencyError
from polling import PATIENCE_S
from tiny_model import write_tiny_model

import stoker
from stoker import errors

LOAD = {"retries": 3}


@stoker.app()
def nap(seconds, begun="", after=None):
    if begun:
        open(begun, "w").close()
    time.sleep(seconds)
    return seconds


def left(session) -> int:
    status = session.status()
    return int(status.running + status.queued)


def test_cancelled_running_call_is_stopped_and_not_retried(session, tmp_path):
    begun = tmp_path / "begun"
    future = nap(600, str(begun))
    until(begun.exists, why="the call runs")
    before = session.status().cancelled
    assert future.cancel()
    assert future.cancel(), "the future is already cancelled"
    assert (future.done(), future.cancelled()) == (True, True)
    with pytest.raises(CancelledError):
        future.result(0)
    until(lambda: left(session) == 0, why="nothing runs")
    assert session.status().cancelled == before + 1
    assert nap(0.0).result(60) == 0.0


def test_cancelled_queued_calls_never_run(session, tmp_path):
    marks = [tmp_path / f"begun-{number}" for number in range(30)]
    futures = [nap(0.1, str(mark)) for mark in marks]
    assert all(future.cancel() for future in futures[15:])
    assert not wait(futures, timeout=60).not_done
    assert [mark.exists() for mark in marks] == [True] * 15 + [False] * 15


def test_cancelled_call_with_a_pending_argument_never_runs(session, tmp_path):
    begun, gate = tmp_path / "begun", tmp_path / "gate"

    @stoker.app()
    def gated(path):
        while not os.path.exists(path):
            time.sleep(0.01)
        return 1.0

    first = gated(str(gate))
    second = nap(0, str(begun), after=first)
    third = nap(0, after=second)
    assert second.cancel()
    assert second.cancelled()
    with pytest.raises(DependencyError):
        third.result(60)
    gate.touch()
    assert first.result(60) == 1.0
    assert nap(0).result(60) == 0
    until(lambda: left(session) == 0, why="nothing is left")
    assert not begun.exists()


packing, go_on = threading.Event(), threading.Event()


class SlowToPack:
    """A string whose pickling waits until the test sets `go_on`."""

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        packing.set()
        go_on.wait(2 * PATIENCE_S)
        return str, (self.text,)


def test_call_cancelled_while_its_arguments_are_pickled_never_starts(session, tmp_path):
    begun = tmp_path / "begun"
    # arguments with a future are packed when the future is done
    future = nap(600, SlowToPack(str(begun)), after=nap(0))
    assert packing.wait(PATIENCE_S)
    assert future.cancel()
    go_on.set()
    until(lambda: future.task_record["exec_fu"] is not None, why="the kernel has its future")
    assert future.task_record["exec_fu"].call is None, "the call was not submitted"
    assert nap(0.0).result(PATIENCE_S) == 0.0
    assert not begun.exists()


def test_finished_call_cannot_be_cancelled(session):
    future = nap(0.0)
    assert future.result(60) == 0.0
    assert not future.cancel()
    assert not future.cancelled()
    assert future.result(0) == 0.0


def test_executor_futures_report_cancellation_to_waiters(session):
    futures = [session.executor.submit(time.sleep, {}, 600) for _ in range(4)]
    assert all(future.cancel() for future in futures)
    assert all(future.cancel() for future in futures)
    assert not wait(futures, timeout=PATIENCE_S).not_done


def test_call_that_kills_its_process_runs_at_most_twice(session, tmp_path):
    @stoker.app()
    def dies(path):
        with open(path, "a") as file:
            file.write("x")
        os.kill(os.getpid(), 9)

    with pytest.raises(errors.PoisonCallError):
        dies(str(tmp_path / "deaths")).result(60)
    assert (tmp_path / "deaths").read_text() == "xx"


# ---- calls of a model


class Words:
    """A model that needs a long time for long texts."""

    def complete(self, _prompt, *, max_new_tokens):
        return "".join(self.stream(_prompt, max_new_tokens=max_new_tokens))

    def stream(self, _prompt, *, max_new_tokens):
        for number in range(max_new_tokens):
            stoker.progress(number)  # `progress` raises if the call should stop
            time.sleep(0.01)
            yield "a"


@stoker.context(max_libraries=1)  # without this limit another device may load the context
def words():
    return Words()


@pytest.fixture(scope="module", params=["words", pytest.param("language model", marks=pytest.mark.long)])
def writer(session, tmp_path_factory, request):
    if request.param == "words":
        recipe = words()
    else:
        for name in ("torch", "transformers", "tokenizers", "safetensors"):
            pytest.importorskip(name)
        folder = tmp_path_factory.mktemp("models") / "tiny"
        write_tiny_model(folder, ends=False)
        recipe = stoker.causal_lm(folder)
    return recipe, stoker.app(context=recipe)(holder)().result(2 * PATIENCE_S)


def holder(model):
    return os.getpid()


def writes(model, begun):
    open(begun, "w").close()
    return [str(model.complete("abc", max_new_tokens=1_900)) for _ in range(1_000)]


def streams(model, begun):
    open(begun, "w").close()
    for _ in range(1_000):
        yield from model.stream("abc", max_new_tokens=1_900)


def cancel_future(recipe, begun):
    future = stoker.app(context=recipe)(writes)(begun)
    until(lambda: os.path.exists(begun), why="the call runs")
    assert future.cancel()


def cancel_map(recipe, begun):
    def first_is_short(model, path):
        return writes(model, path) if path else ""

    with stoker.map(stoker.app(context=recipe)(first_is_short), ["", *(f"{begun}-{n}" for n in range(4))]) as results:
        assert next(results) == ""
        until(lambda: os.path.exists(f"{begun}-0"), why="another call runs")


def cancel_stream(recipe, begun):
    with stoker.stream(stoker.app(context=recipe, stream=True)(streams), begun) as pieces:
        next(pieces)


def cancel_silent_stream(recipe, begun):
    def silent(model, begun):
        yield writes(model, begun)

    with stoker.stream(stoker.app(context=recipe, stream=True)(silent), begun):
        until(lambda: os.path.exists(begun), why="the call runs")


def time_out(recipe, begun):
    future = stoker.app(context=recipe, timeout="1 s")(writes)(begun)
    with pytest.raises(errors.CallTimeoutError):
        future.result(PATIENCE_S)


@pytest.mark.parametrize("leave", [cancel_future, cancel_map, cancel_stream, cancel_silent_stream, time_out])
def test_stopped_call_leaves_its_model_loaded(session, writer, tmp_path, leave):
    recipe, pid = writer
    leave(recipe, str(tmp_path / "begun"))
    until(lambda: left(session) == 0, why="nothing runs")
    assert stoker.app(context=recipe)(holder)().result(PATIENCE_S) == pid


def test_interrupted_submission_leaves_no_task(session, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.executor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            nap(0.0)
    kernel = session._kernel
    until(lambda: not kernel.tasks, why="no task is left, although the session retries calls")
    assert nap(0.0).result(PATIENCE_S) == 0.0
