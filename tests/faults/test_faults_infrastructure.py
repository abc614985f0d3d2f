"""A call that fails because of a disk, device or network is retried on another pilot. A user error is not retried."""

from __future__ import annotations

import os

import pytest
from faults.world import site_file, until

import stoker
from stoker.sessions import sent_call


def a_disk_fails():
    with open("/proc/self/mem", "rb") as file:
        file.read(1)  # the kernel returns EIO


def a_device_fails():
    import ctypes

    set_error = ctypes.pythonapi.PyErr_SetObject
    set_error.argtypes, set_error.restype = (ctypes.py_object, ctypes.py_object), None
    set_error(RuntimeError, "CUDA error: uncorrectable ECC error encountered")


def user_fails():
    raise OSError(5, "Input/output error")


@pytest.fixture(scope="module")
def pair(shared_world):
    with stoker.load(site_file(shared_world.path, pilots=2), run_dir=str(shared_world.runs)) as session:
        until(lambda: len(session.status().pilots) == 2, why="both pilots")
        yield session


@pytest.fixture
def attempt(tmp_path):
    """Return a function that submits a call. The call runs `act` on its first pilot only, and returns its pilots so
    far.
    """
    log = tmp_path / "log"

    def run(act, log):
        with open(log, "a+") as file:
            file.write(f"{os.environ['STOKER_PILOT']}\n")
            file.seek(0)
            ran = file.read().split()
        if ran[-1] == ran[0]:
            act()
        return ran

    app = stoker.app(run)
    return lambda act: app(act, str(log))


def told(session, future):
    call = sent_call(future)
    return str(session.explain(call.parsl_executor_task_id))


@pytest.mark.parametrize(
    ("act", "said"), [(a_disk_fails, "[Errno 5] Input/output error"), (a_device_fails, "uncorrectable ECC error")]
)
def test_call_that_fails_on_one_pilot_runs_on_another_pilot(pair, attempt, act, said):
    before = pair.status()
    failed, reruns, future = before.failed, before.rerun_calls, attempt(act)
    first, second = future.result(60)
    assert first != second
    status = pair.status()
    assert (status.failed, status.rerun_calls) == (failed, reruns + 1)
    story = told(pair, future)
    assert said in story
    assert f"not on {first}" in story or f"not on cpu:0 of {first}" in story
    assert said in str(pair.explain(first))


def test_exception_of_user_code_is_not_retried(pair, attempt):
    future = attempt(user_fails)
    with pytest.raises(OSError, match="Input/output error") as caught:
        future.result(60)
    assert "raise OSError(5" in str(caught.value.__cause__)
    assert "runs again" not in told(pair, future)
