"""Failures of Parsl's own apps and wrappers appear in monitoring, errors and `stoker explain`."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import parsl
import pytest
from parsl import bash_app, python_app
from parsl.app.bash import remote_side_bash_executor
from parsl.app.errors import wrap_error
from parsl.app.python import timeout
from parsl.data_provider.http import in_task_transfer_wrapper
from parsl.executors import HighThroughputExecutor
from parsl.monitoring.radios.filesystem import FilesystemRadio
from parsl.monitoring.remote import monitor_wrapper

import stoker
from stoker.manager.executor.prepared import function_name, without_parsl_wrappers


def good(number: int) -> int:
    return number


def bad(number: int) -> int:
    raise ValueError(f"no {number}")


def walled(number: int, walltime: float = 30.0) -> int:
    raise KeyError(number)


def command() -> str:
    return "exit 3"


def _rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(database) as db:
        return db.execute(query).fetchall()


@pytest.mark.long
def test_monitoring_shows_failures_like_parsls_own_executors(
    load: Callable[..., Any], local: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("STOKER_TESTS_MONITORING", "1")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)  # Parsl finds programs on PATH
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # a started program imports this module
    from parsl.monitoring import MonitoringHub

    database = tmp_path / "monitoring.db"
    htex = HighThroughputExecutor(label="htex", address="127.0.0.1", max_workers_per_node=1, provider=local())
    hub = MonitoringHub(resource_monitoring_interval=1, logging_endpoint=f"sqlite:///{database}")
    executor = load(label="stoker", others=(htex,), config={"monitoring": hub})
    futures = [
        (python_app if made is not command else bash_app)(made, executors=[label])(*arguments)
        for label in ("stoker", "htex")
        for made, arguments in ((good, (1,)), (bad, (2,)), (walled, (3,)), (command, ()))
    ]
    ends = [type(future.exception(60)) for future in futures]
    assert stoker.app(executors=["stoker"])(pow)(2, 3).result(60) == 8
    status = executor.ask_status()
    assert status is not None
    assert status.failed == 3, "the session itself knows them as failures"
    parsl.dfk().cleanup()
    assert [kind.__name__ for kind in ends[:4]] == [kind.__name__ for kind in ends[4:]]
    seen = _rows(
        database,
        "select task_executor, task_func_name, task_fail_history, hostname, block_id from try"
        " join task using (task_id, run_id) order by task_id",
    )
    assert [row[1:] for row in seen if row[0] == "stoker"][:4] == [row[1:] for row in seen if row[0] == "htex"]
    states = _rows(database, "select task_id, task_status_name from status order by task_id, timestamp")
    of_stoker, of_htex, of_app = ([name for task, name in states if task // 4 == part] for part in (0, 1, 2))
    assert of_stoker == of_htex
    assert {"running", "running_ended", "exec_done"} <= set(of_app)
    assert {task for (task,) in _rows(database, "select task_id from resource")} <= {4, 5, 6, 7}, (
        "no resources of a library"
    )
    assert _rows(database, "select count(*) from block where status = 'RUNNING' and executor_label = 'stoker'")[0][0]
    nodes = _rows(database, "select hostname, uid, block_id, active, python_v, cpu_count, worker_count from node")
    ours = [row for row in nodes if row[1] == status.pilots[0].pilot]
    theirs = [row for row in nodes if row not in ours]
    assert [row[3] for row in ours] == [True, False], "it joined, and it is gone"
    assert {(row[0], row[2], row[4]) for row in ours} == {(row[0], row[2], row[4]) for row in theirs}
    assert all(row[5] > 0 and row[6] > 0 for row in ours)


def _monitored(function: Callable[..., Any]) -> Callable[..., Any]:
    return monitor_wrapper(  # type: ignore[no-any-return]
        f=function, args=(), kwargs={}, x_try_id=0, x_task_id=0, radio_config=FilesystemRadio(), run_id="r",
        logging_level=0, sleep_dur=1.0, monitor_resources=False, run_dir="/",
    )[0]  # fmt: skip


@pytest.mark.parametrize(
    "wrapped",
    [
        bad,
        wrap_error(bad),
        timeout(wrap_error(bad), 3.0),
        _monitored(timeout(wrap_error(bad), 3.0)),
        in_task_transfer_wrapper(_monitored(wrap_error(bad)), None, "/"),
        wrap_error(partial(remote_side_bash_executor, bad)),
    ],
)
def test_user_function_is_found_under_the_wrappers_of_parsl(wrapped: Callable[..., Any]) -> None:
    assert without_parsl_wrappers(wrapped) is bad
    assert function_name(without_parsl_wrappers(wrapped)) == "bad"


def test_function_of_parsl_itself_is_not_unwrapped() -> None:
    assert without_parsl_wrappers(parsl.set_stream_logger) is parsl.set_stream_logger
    assert without_parsl_wrappers(partial(good, 1)).args == (1,)  # type: ignore[attr-defined]
    assert stoker.app(good).function is good
