from __future__ import annotations

import ctypes
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lazily import lazily
from polling import PATIENCE_S, polls

torch, core_share = lazily("torch", "stoker.contexts.inference.core_share")


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Machine:
    """Simulated cores that other processes use partly. The tested `CoreShare` computes for one second at a time."""

    def __init__(self, most: int, *, cores: float) -> None:
        self.cores, self.now, self.cpu_s = cores, 0.0, 0.0
        self.busy = 1.0  # share of time in which each thread has work
        self.idle = 0.0
        torch.set_num_threads(most)
        self.share = core_share.CoreShare(
            idle_cores=lambda: self.idle,
            clock=lambda: self.now,
            cpu_time=lambda: self.cpu_s,
        )

    def compute(self, *, times: int = 1, others: float = 0.0) -> list[int]:
        used = []
        for _ in range(times):
            with self.share.computing():
                threads = torch.get_num_threads()
                wanted = threads * self.busy
                mine = min(wanted, self.cores * wanted / (wanted + others) if wanted + others > self.cores else wanted)
                self.now += 1.0
                self.cpu_s += mine
                self.idle = max(0.0, self.cores - wanted - others)
            used.append(threads)
        return used


@pytest.mark.parametrize(
    ("changes", "others", "expected"),
    [
        ({}, 0, [4, 4, 4, 4]),
        ({}, 2, [4, 2, 2, 2]),
        ({}, 4, [4, 2, 1, 1]),  # with fewer threads, the process gets a smaller part of the cores
        ({"busy": 0.3}, 0, [4, 4, 4, 4]),  # idle threads do not show that other processes run
    ],
)
def test_thread_count_decreases_if_other_processes_use_the_cores(changes, others, expected):
    machine = Machine(4, cores=4)
    vars(machine).update(changes)
    assert machine.compute(times=4, others=others) == expected


def test_thread_count_is_restored_after_other_processes_end() -> None:
    machine = Machine(4, cores=4)
    assert machine.compute(times=3, others=2)[-1] == 2
    assert machine.compute(times=8, others=0)[-1] == 4


def test_thread_limit_applies_to_each_computing_thread() -> None:
    machine = Machine(3, cores=3)
    with ThreadPoolExecutor(1) as pool:
        assert machine.compute(times=2, others=6) == [3, 1]
        assert pool.submit(machine.compute).result(10) == [1]


def test_thread_count_set_by_a_program_is_respected() -> None:
    machine = Machine(4, cores=4)
    assert machine.compute(times=2, others=2) == [4, 2]
    torch.set_num_threads(1)
    assert machine.compute(times=30) == [1] * 30
    torch.set_num_threads(3)
    assert machine.compute() == [3]


def test_idle_time_of_the_cores_of_this_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert core_share._IdleCoreMeter()() >= 0.0
    said = iter([100.0, 99.9])
    monkeypatch.setattr("stoker.contexts.inference.core_share._total_idle_seconds", lambda: next(said))
    assert core_share._IdleCoreMeter()() == 0.0, "a decreasing idle time counts as zero"


def test_thread_count_is_not_adjusted_on_a_gpu() -> None:
    with core_share.compute_context_for_device("cuda:0")():
        pass
    assert core_share.compute_context_for_device("cpu") == core_share.get_core_share().computing


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_once_below(most: int) -> int:
    """Wait until fewer than `most` threads exist; return their number. The system shows joined threads a moment
    longer.
    """
    for _ in polls(PATIENCE_S):
        if (found := threads()) < most:
            break
    return found


def test_released_helper_threads_end_and_start_again_on_use() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found: list[int] = []
    product = torch.full((512, 512), 2.0)

    def compute() -> None:
        assert float((product @ product)[0, 0]) == 2048.0
        found.append(threads())
        core_share.release_helper_threads()
        found.append(threads_once_below(found[0]))
        assert float((product @ product)[0, 0]) == 2048.0
        found.append(threads())

    try:
        if not core_share._openmp_libraries():
            pytest.skip("this PyTorch does not use GNU's OpenMP")
        worker = threading.Thread(target=compute)
        worker.start()
        worker.join(2 * PATIENCE_S)
        with_helpers, without, again = found
        assert without < with_helpers
        assert again > without
    finally:
        torch.set_num_threads(before)


def test_helper_threads_end_if_other_packages_load_openmp_too(tmp_path: Path) -> None:
    """Several OpenMP libraries may be loaded, and the first of them in memory may be unused."""
    torch.set_num_threads(torch.get_num_threads())  # PyTorch is loaded
    libraries = core_share._openmp_libraries()
    if not libraries:
        pytest.skip("this PyTorch does not use GNU's OpenMP")
    copy = shutil.copy(libraries[0], tmp_path / "libgomp-of-another-package.so.1")
    ctypes.CDLL(copy)
    assert {*libraries, str(copy)} <= {*core_share._openmp_libraries()}
    test_released_helper_threads_end_and_start_again_on_use()
