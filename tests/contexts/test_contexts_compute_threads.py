"""A thread that has computed gives its helper threads back, and computes as before when it is asked to again."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
from pathlib import Path

import pytest
from lazily import lazily
from polling import PATIENCE_S, polls

torch, compute_threads = lazily("torch", "stoker.contexts.inference.core_share")


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_once_below(most: int) -> int:
    """How many threads there are as soon as there are fewer than `most`. The system shows a thread that has been joined
    for a moment longer."""
    for _ in polls(PATIENCE_S):
        if (found := threads()) < most:
            break
    return found


def test_helpers_end_and_come_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found: list[int] = []
    product = torch.full((512, 512), 2.0)

    def compute() -> None:
        assert float((product @ product)[0, 0]) == 2048.0
        found.append(threads())
        compute_threads.release_helper_threads()
        found.append(threads_once_below(found[0]))
        assert float((product @ product)[0, 0]) == 2048.0
        found.append(threads())

    try:
        if not compute_threads._openmp_libraries():
            pytest.skip("this PyTorch does not use GNU's OpenMP")
        worker = threading.Thread(target=compute)
        worker.start()
        worker.join(2 * PATIENCE_S)
        with_helpers, without, again = found
        assert without < with_helpers
        assert again > without
    finally:
        torch.set_num_threads(before)


def test_helpers_end_where_other_packages_bring_openmp_too(tmp_path: Path) -> None:
    """Copies of the library lie at any addresses, so the first one found may be unused."""
    torch.set_num_threads(torch.get_num_threads())  # PyTorch is loaded
    libraries = compute_threads._openmp_libraries()
    if not libraries:
        pytest.skip("this PyTorch does not use GNU's OpenMP")
    copy = shutil.copy(libraries[0], tmp_path / "libgomp-of-another-package.so.1")
    ctypes.CDLL(copy)
    assert {*libraries, str(copy)} <= {*compute_threads._openmp_libraries()}
    test_helpers_end_and_come_back()
