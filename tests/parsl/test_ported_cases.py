"""Run cases of Parsl's test suite for HTEX on Stoker's executor."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time

import parsl
import pytest
from parsl import python_app
from parsl.executors.errors import BadStateException
from parsl.jobs.states import JobState

import stoker
from stoker import StokerExecutor, errors


@python_app
def double(x, parsl_resource_specification=None):
    return 2 * x


@python_app
def nap(seconds):

    time.sleep(seconds)
    return seconds


@python_app
def wait_for(path):
    import os

    while not os.path.exists(path):
        time.sleep(0.01)


# ---- test_htex/test_priority_queue


def test_calls_of_higher_priority_run_first(load, tmp_path, until):
    executor = load(site=_site(tmp_path, 'devices = "cpu:1"'))

    @python_app
    def note(name, log, parsl_resource_specification=None):
        with open(log, "a") as file:
            file.write(name)

    log, gate = str(tmp_path / "order"), tmp_path / "gate"
    assert nap(0.3).result(60) == 0.3  # long calls are expected after this call, so a library prefetches few calls
    # these calls fill the library and its queue, so no later call overtakes them
    blockers = [wait_for(str(gate)) for _ in range(5)]
    later = [note(str(p), log, parsl_resource_specification={"priority": p}) for p in (1, 5, 3, 1, 5, 3)]
    until(lambda: (status := executor.ask_status()).queued + status.running == len(blockers) + len(later))
    gate.touch()
    for future in [*blockers, *later]:
        future.result(60)
    assert (tmp_path / "order").read_text() == "553311"


def _site(folder, *settings):
    file = folder / "site.toml"
    file.write_text("[pilot]\n" + "\n".join(settings) + "\n")
    return file


# ---- test_htex/test_disconnected_blocks, test_disconnected_blocks_failing_provider, test_multiple_...


@pytest.mark.parametrize(("ending", "state"), [("exit 3", JobState.FAILED), ("exit 0", JobState.MISSING)])
def test_blocks_that_never_start_a_pilot_end_the_executor(load, local, until, ending, state):
    executor = load(provider=local(worker_init=f"echo cannot find the module >&2; {ending}"))
    waiting = double(1)
    with pytest.raises(BadStateException, match="cannot find the module"):
        waiting.result(60)
    assert executor.bad_state_is_set
    assert executor.status_facade["0"].state is state
    with pytest.raises(Exception, match="cannot find the module"):
        double(2).result(60)
    assert executor.outstanding() == 0


@pytest.mark.long
def test_provider_that_raises_fails_the_executor(load, local):
    provider = local()
    provider.submit = _raise
    executor = load(provider=provider)
    with pytest.raises(BadStateException, match="no such partition"):
        double(1).result(30)
    assert executor.status_facade["0"].state is JobState.FAILED


def _raise(*args, **kwargs):
    raise RuntimeError("no such partition")


@pytest.mark.long
def test_block_error_handler_receives_failed_blocks(load, local, until):
    asked = []
    executor = load(
        provider=local(worker_init="exit 3"),
        block_error_handler=lambda executor, status: asked.append({k: s.state for k, s in status.items()}),
    )
    until(lambda: any(JobState.FAILED in states.values() for states in asked))
    assert not executor.bad_state_is_set


# ---- test_htex/test_connected_blocks, test_scaling/test_scale_down, test_drain


@pytest.mark.long
def test_scaled_in_blocks_finish_their_running_calls(load, local, until):
    executor = load(provider=local(min_blocks=0, max_blocks=2))
    assert double(1).result(60) == 2
    assert executor.scale_out_facade(1) == ["1"]
    until(lambda: len(executor.ask_status().pilots) == 2)
    assert executor.status()["1"].state is JobState.RUNNING
    assert executor.ask_status().blocks["1"].startswith("running")
    running = [nap(1.5) for _ in range(4)]
    until(lambda: executor.ask_status().running >= 1)
    assert len(executor.scale_in_facade(2)) == 2
    assert executor.status_facade["0"].state is JobState.SCALED_IN
    until(lambda: all(future.done() for future in running[:2]))
    assert running[0].result() == 1.5
    executor.scale_out_facade(1)
    assert [future.result(60) for future in running] == [1.5] * 4


@pytest.mark.long
def test_scaling_in_prefers_idle_blocks(load, local, until, tmp_path):
    executor = load(provider=local(init_blocks=2, max_blocks=2, min_blocks=0), config={"strategy": "none"})
    until(lambda: len(executor.ask_status().pilots) == 2)
    busy = wait_for(str(tmp_path / "gate"))
    until(lambda: executor.ask_status().running == 1)
    status = executor.ask_status()
    at = next(library.pilot for library in status.libraries if library.running)
    block = next(pilot.block for pilot in status.pilots if pilot.pilot == at)
    assert executor.scale_in(2, max_idletime=0.0) == [b for b in ("0", "1") if b != block]
    (tmp_path / "gate").touch()
    assert busy.result(60) is None


@pytest.mark.long
def test_idle_blocks_are_scaled_in_by_parsls_strategy(load, local, until):
    executor = load(provider=local(min_blocks=0), config={"max_idletime": 0.5})
    assert double(1).result(60) == 2
    until(lambda: executor.status_facade["0"].state is JobState.SCALED_IN)
    until(lambda: not executor.ask_status().pilots)
    assert double(2).result(60) == 4  # the strategy starts a new block


# ---- test_htex/test_manager_failure; tests/faults kills pilots, managers and libraries


def test_manager_that_cannot_run_ends_the_executor_with_its_log(load, caplog):
    executor = load()
    executor._manager._command = ["sh", "-c", "echo this disk is full >&2; exit 4"]
    waiting = nap(60)
    os.kill(executor._manager.pid, signal.SIGKILL)
    with pytest.raises(BadStateException, match="this disk is full"):
        waiting.result(60)
    assert "the manager was killed by signal 9; it is started again" in caplog.text
    with pytest.raises(errors.SessionError, match="exit code 4"):
        double(1).result(60)


# ---- test_monitoring


@pytest.mark.long
def test_calls_report_to_parsl_monitoring_by_the_chosen_radio(load, tmp_path, monkeypatch):
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("STOKER_TESTS_MONITORING", "1")
    from parsl.monitoring import MonitoringHub
    from parsl.monitoring.radios.udp import UDPRadio

    database = tmp_path / "monitoring.db"
    hub = MonitoringHub(resource_monitoring_interval=1, logging_endpoint=f"sqlite:///{database}")
    radio = UDPRadio(address="127.0.0.1")
    load(config={"monitoring": hub}, remote_monitoring_radio=radio)
    assert radio.port, "its receiver listens"
    assert double(4).result(60) == 8
    parsl.dfk().cleanup()
    with sqlite3.connect(database) as db:
        states = {state for (state,) in db.execute("select task_status_name from status")}
    assert {"running", "running_ended"} <= states, "the data that only the call can send has arrived"
    assert not list(tmp_path.rglob("monitor-fs-radio")), "the default radio leaves files"


# ---- requirements of any executor


@pytest.mark.parametrize("mode", ["task_exit", pytest.param("manual", marks=pytest.mark.long)])
def test_result_that_parsl_cannot_checkpoint_reaches_the_caller(load, tmp_path, caplog, mode):
    from parsl.utils import get_all_checkpoints

    @python_app(cache=True)
    def adder(number):
        return (lambda other: number + other) if number < 3 else number

    @stoker.app(cache=True)
    def other_adder(number):
        return (lambda other: number + other) if number < 30 else number

    memoizer = parsl.dataflow.memoization.BasicMemoizer
    load(config={"memoizer": memoizer(checkpoint_mode=mode)})
    for add, plain in ((adder, 3), (other_adder, 30)):
        assert add(plain).result(60) == plain
        assert add(2).result(60)(3) == 5
        assert add(2).result(60)(4) == 6, "this program remembers it"
        assert add(1).result(60)(4) == 5
        assert add(plain + 1).result(60) == plain + 1
    if mode == "manual":
        parsl.dfk().memoizer.checkpoint()
    parsl.dfk().cleanup()
    for name in ("adder", "other_adder"):
        assert sum(f"a result of {name} cannot be kept in Parsl's checkpoint" in line for line in caplog.messages) == 1
    later = memoizer(checkpoint_files=get_all_checkpoints(str(tmp_path)))
    later.start(run_dir=str(tmp_path), config_run_dir=str(tmp_path))
    assert sorted(future.result() for future in later.memo_lookup_table.values()) == [3, 4, 30, 31], (
        "the file is complete"
    )


def test_executor_runs_without_a_parsl_dataflow_kernel(tmp_path, local, processes_of, until):
    executor = StokerExecutor(provider=local())
    executor.run_dir = str(tmp_path)
    with executor:
        executor.start()
        assert executor.submit(pow, {}, 2, 10).result(60) == 1024
        assert executor.outstanding() == 0
        assert executor.workers_per_node == len(os.sched_getaffinity(0))
        assert executor.monitor_resources() is False
        assert "session" in repr(executor)
    until(lambda: not processes_of(tmp_path))
    with pytest.raises(errors.SessionError):
        executor.submit(pow, {}, 2, 10)


def test_cleanup_ends_running_calls_processes_and_threads(load, tmp_path, processes_of, until):
    before = set(threading.enumerate())  # other tests may have left threads of their models
    executor = load()
    running = [nap(3600) for _ in range(5)]  # the cleanup does not wait for these calls
    until(lambda: executor.ask_status().running >= 1)
    assert len(processes_of(tmp_path)) >= 2
    parsl.dfk().cleanup()
    until(lambda: not processes_of(tmp_path))
    for future in running:
        with pytest.raises(errors.StokerError):
            future.result(1)
    until(lambda: not any("stoker" in thread.name for thread in set(threading.enumerate()) - before))
