from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE_S

import stoker.contexts as contexts
from stoker.contexts import ambient, payloads
from stoker.errors import SerializationError, StokerError


def test_devices_have_the_names_of_pytorch() -> None:
    for given, seen in {
        "cpu": ("cpu",),
        "cpu:3": ("cpu",),
        ("cuda:3",): ("cuda:0",),
        ("cuda:2", "cuda:5"): ("cuda:0", "cuda:1"),
        (): ("cpu",),
    }.items():
        ambient.enter_library(device=given)
        assert ambient.devices() == seen
        assert contexts.device() == seen[0]


def test_ambient_functions_work_outside_a_library() -> None:
    assert contexts.device() in ("cpu", "cuda:0")
    contexts.progress(1, 2)
    assert contexts.saved_state("fresh") == "fresh"
    assert contexts.scratch().is_dir()
    assert contexts.scratch() == contexts.scratch()
    with pytest.raises(StokerError, match="only inside a library"):
        contexts.load_variable_from_serverless("model")


def test_variables_of_the_context_are_available_in_calls() -> None:
    ambient.enter_library(device="cpu", context={"model": 1, "tokenizer": 2})
    assert contexts.load_variable_from_serverless("model") == 1
    with pytest.raises(StokerError, match=r"no variable 'modle'.*'model', 'tokenizer'"):
        contexts.load_variable_from_serverless("modle")
    ambient.enter_library(device="cpu", context=[1])
    with pytest.raises(StokerError, match=r"returned a list, not a dict"):
        contexts.load_variable_from_serverless("model")


def test_object_paths_remain_known_after_the_context_load() -> None:
    ambient.enter_library(device="cpu", objects={"file-1": "/cache/file-1"})
    ambient.enter_library(device="cpu", context=1)
    assert contexts.local_path("file-1") == Path("/cache/file-1")
    assert contexts.local_path("other") == Path("other")


def test_reported_progress_is_passed_to_the_hook_of_the_call() -> None:
    seen: list[tuple[float, float, float, Any]] = []

    def hook(done: float, total: float, metric: float, state: bytes) -> bool:
        seen.append((done, total, metric, payloads.loads(state) if state else None))
        return False

    ambient.enter_call_scope(hook=hook)
    contexts.progress(1, 10)
    contexts.progress(2, 10, 0.5, {"step": 2})
    contexts.progress(3, state=lambda: [3])
    ambient.leave_call_scope()
    contexts.progress(4)
    assert seen == [(1, 10, 0, None), (2, 10, 0.5, {"step": 2}), (3, 0, 0, [3])]


def test_unpicklable_checkpoint_raises_an_error() -> None:
    ambient.enter_call_scope(hook=lambda *_: False)
    with pytest.raises(SerializationError, match="checkpoint"):
        contexts.progress(1, state=[threading.Lock()])
    with pytest.raises(SerializationError, match="checkpoint"):
        contexts.progress(1, state=threading.Lock)  # a callable state is called


def test_concurrent_calls_have_separate_progress_and_folders(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def call(number: int) -> tuple[list[float], Path]:
        heard: list[float] = []
        ambient.enter_call_scope(hook=lambda done, *_: bool(heard.append(done)), folder=str(tmp_path / str(number)))  # type: ignore[func-returns-value]
        barrier.wait(PATIENCE_S)
        for step in range(50):
            contexts.progress(number * 100 + step)
        folder = contexts.scratch()
        barrier.wait(PATIENCE_S)
        ambient.leave_call_scope()
        return heard, folder

    with ThreadPoolExecutor(8) as pool:
        for number, (heard, folder) in enumerate(pool.map(call, range(8))):
            assert heard == [number * 100 + step for step in range(50)]
            assert folder == tmp_path / str(number)


def test_thread_started_by_a_call_reports_progress_for_that_call() -> None:
    heard: list[float] = []
    ambient.enter_call_scope(hook=lambda done, *_: bool(heard.append(done)))  # type: ignore[func-returns-value]
    thread = threading.Thread(target=lambda: contexts.progress(7))
    thread.start()
    thread.join()
    assert heard == [7]
