"""Give each test a private state folder, shut down its executors, and check for leftover processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parsl
import psutil
import pytest
from faults.world import until
from parsl.config import Config
from parsl.providers import LocalProvider

from stoker import StokerExecutor


@pytest.fixture(autouse=True, scope="session")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(name="until")
def _until() -> Callable[..., Any]:
    return until


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., StokerExecutor]]:
    def load(
        *, provider: Any = None, others: tuple[Any, ...] = (), config: Any = None, **options: Any
    ) -> StokerExecutor:
        executor = StokerExecutor(provider=provider or local(), **options)
        settings = {"initialize_logging": False, "strategy_period": 0.2, "run_dir": str(tmp_path), **(config or {})}
        parsl.load(Config(executors=[executor, *others], **settings))
        return executor

    yield load
    if parsl.dataflow.dflow.DataFlowKernelLoader._dfk is not None:
        parsl.dfk().cleanup()
    until(lambda: not processes_of(tmp_path))


def local(**blocks: Any) -> LocalProvider:
    return Quick(**{"init_blocks": 1, "min_blocks": 1, "max_blocks": 1, **blocks})


class Quick(LocalProvider):
    status_polling_interval = 0.2


@pytest.fixture(name="local")
def _local() -> Callable[..., LocalProvider]:
    return local


@pytest.fixture(name="processes_of")
def _processes_of() -> Callable[[Path], list[psutil.Process]]:
    return processes_of
