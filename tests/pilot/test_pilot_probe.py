from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_manager import FakeManager, recipe
from polling import PATIENCE_S

from stoker.pilot.core.events import DeviceHealth, ProbeVerdict
from stoker.pilot.devices import find_devices, gpu, visibility_variables
from stoker.pilot.devices.probe import MATRIX_SIZE, CudaDevice, DeviceError, NoDriverError, examine_device, run_probe
from stoker.pilot.zygote import processes
from stoker.protocol.ids import DeviceId
from stoker.protocol.to_manager import DeviceFault


def product(a: array[float], b: array[float], size: int) -> array[float]:
    """Multiply two matrices like the kernel of the probe."""
    columns = [b[j::size] for j in range(size)]
    out, known = array("f"), dict[bytes, list[float]]()
    for i in range(size):
        row = a[i * size : (i + 1) * size]
        if row.tobytes() not in known:  # compute only different rows, because Python is slow
            known[row.tobytes()] = [sum(map(float.__mul__, row, column)) for column in columns]
        out.extend(known[row.tobytes()])
    return out


class WrongDevice:
    """A device whose products have one wrong element."""

    def __init__(self, index: int, by: float) -> None:
        self._index, self._by = index, by

    def multiply(self, a: array[float], b: array[float], size: int) -> array[float]:
        out = product(a, b, size)
        out[self._index] += self._by
        return out


@pytest.mark.parametrize(
    ("index", "by"),
    [(0, 7000.0), (MATRIX_SIZE * MATRIX_SIZE - 1, 7000.0), (5, float("nan"))],
)
def test_probe_detects_a_single_wrong_element_of_a_product(index: int, by: float) -> None:
    verdict, words = examine_device(WrongDevice(index, by), name="cuda:0")
    assert verdict is ProbeVerdict.WRONG
    assert words == "cuda:0 gave a wrong matrix product (1 of 262,144 elements are wrong)"


@pytest.mark.parametrize(
    ("text", "answer", "said"),
    [
        ("", ProbeVerdict.SOUND, ""),
        ("print('cpu:0 gave nonsense'); sys.exit(5)", ProbeVerdict.WRONG, "cpu:0 gave nonsense"),
        ("print('none here'); sys.exit(3)", ProbeVerdict.UNKNOWN, "none here"),
        ("raise OSError('a driver fault')", ProbeVerdict.FAILED, "exit code 1: OSError: a driver fault"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ProbeVerdict.FAILED, "its probe exited with SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ProbeVerdict.UNKNOWN, "was killed by a signal"),
        ("time.sleep(100)", ProbeVerdict.FAILED, "did not end within"),
    ],
)
def test_exit_of_a_probe_process_gives_the_expected_verdict(
    monkeypatch: pytest.MonkeyPatch, text: str, answer: ProbeVerdict, said: str
) -> None:
    if "sleep" in text:
        monkeypatch.setattr("stoker.pilot.devices.probe.PROBE_LIMIT_S", 0.3)
    command = (sys.executable, "-c", f"import os, signal, sys, time; {text or 'pass'}")
    got, words = run_probe(command, "cpu:0")
    assert got is answer
    assert said in words


def test_probe_that_cannot_be_started_is_reported() -> None:
    answer, said = run_probe(("/no/such/probe",), "cpu:0")
    assert answer is ProbeVerdict.UNKNOWN
    assert "could not be started" in said


def test_cleanup_of_stray_processes_spares_a_running_probe(tmp_path: Path) -> None:
    known = processes.child_processes(os.getpid())
    said: list[tuple[ProbeVerdict, str]] = []
    gate = tmp_path / "gate"
    command = ("sh", "-c", f"while ! test -e {gate}; do sleep 0.01; done; exit {ProbeVerdict.FAILED.value}")
    probing_thread = threading.Thread(target=lambda: said.append(run_probe(command, "cpu:0")))
    probing_thread.start()
    until_there_is(lambda: set(processes.child_processes(os.getpid())) - set(known))
    stray = subprocess.Popen(["sleep", "100"])
    assert processes.kill_stray_children(known, of_main_thread=True) == {stray.pid}
    gate.touch()
    probing_thread.join(PATIENCE_S)
    assert stray.wait() in (0, -signal.SIGKILL)  # 0 if another waiter read the exit status
    assert [answer for answer, _ in said] == [ProbeVerdict.FAILED]


def until_there_is(found: Callable[[], object]) -> None:
    ends_at = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def probe(folder: Path, text: str) -> str:
    """Write a site-defined probe that gets the device name and counts its calls in a file."""
    file = folder / "probe"
    file.write_text(f"#!/bin/sh\necho $1 >> {folder / 'asked'}\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_device_that_fails_twice_is_reported_once(manager: FakeManager, tmp_path: Path) -> None:
    wrong = 'if [ "$1" = cpu:1 ]; then echo "$1 gave a wrong matrix product (error 3e-1, allowed 1e-3)"; exit 5; fi'
    soon = "from stoker.pilot.core import probes; probes.SECOND_PROBE_S = 0.1"
    manager.start_pilot("--devices", "cpu:2", "--probe", probe(tmp_path, wrong), settings=soon)
    manager.hello()  # the hello is sent after the probe of each device
    assert sorted((tmp_path / "asked").read_text().split()) == ["cpu:0", "cpu:1", "cpu:1"]
    fault = manager.wait_for(DeviceFault)
    assert fault == DeviceFault(
        DeviceId("cpu:1"), "cpu:1 gave a wrong matrix product (error 3e-1, allowed 1e-3), twice"
    )
    manager.ready(recipe())  # the other device works
    assert [type(message) for message in manager.said].count(DeviceFault) == 1


@pytest.mark.gpu
def test_real_gpu_passes_the_probe() -> None:
    found = gpu.find_gpus()
    if not found.offered:
        pytest.skip(found.lacks)
    for device in find_devices("gpu").offered:
        assert run_probe(
            (sys.executable, "-P", "-m", "stoker.pilot.devices.probe"), "cuda:0", visibility_variables((device,))
        ) == (
            ProbeVerdict.SOUND,
            "",
        )


OUT_OF_MEMORY, NO_COMPILER, LAUNCH_FAILED = 2, 221, 719
NAMES = {
    OUT_OF_MEMORY: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    NO_COMPILER: (b"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", b"PTX JIT compiler library not found"),
    LAUNCH_FAILED: (b"CUDA_ERROR_LAUNCH_FAILED", b"unspecified launch failure"),
}


class Driver:
    """A driver with device memory in buffers of this process under invented addresses; multiplies like the kernel."""

    def __init__(self, *, room_bytes: int = 10**9, launch: int = 0) -> None:
        self.memory: dict[int, bytearray] = {}
        self.room_bytes = room_bytes
        self.launch = launch
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: self.calls.append(name) or 0

    def cuGetErrorName(self, code: int, into: Any) -> None:
        into._obj.value = NAMES[code][0]

    def cuGetErrorString(self, code: int, into: Any) -> None:
        into._obj.value = NAMES[code][1]

    def cuMemAlloc_v2(self, into: Any, count: ctypes.c_size_t) -> int:
        if count.value > self.room_bytes:
            return OUT_OF_MEMORY
        into._obj.value = 4096 * (1 + len(self.memory))
        self.memory[into._obj.value] = bytearray(count.value)
        self.room_bytes -= count.value
        return 0

    def cuMemcpyHtoD_v2(self, to: Any, source: ctypes.c_void_p, count: ctypes.c_size_t) -> int:
        self.memory[to.value][: count.value] = ctypes.string_at(source.value or 0, count.value)
        return 0

    def cuMemcpyDtoH_v2(self, to: ctypes.c_void_p, source: Any, count: ctypes.c_size_t) -> int:
        ctypes.memmove(to.value or 0, bytes(self.memory[source.value]), count.value)
        return 0

    def cuLaunchKernel(self, _kernel: Any, blocks: int, *rest: Any) -> int:
        *_, pointers, _extra = rest
        a, b, c = (ctypes.c_uint64.from_address(pointers[place]).value for place in range(3))
        size = ctypes.c_uint32.from_address(pointers[3]).value
        assert blocks * rest[2] >= size * size  # the launch has a thread per element
        out = product(array("f", bytes(self.memory[a])), array("f", bytes(self.memory[b])), size)
        self.memory[c][:] = out.tobytes()
        return self.launch


def test_probe_computes_a_matrix_product_with_the_driver() -> None:
    driver = Driver()
    assert examine_device(CudaDevice(driver), name="cuda:0") == (ProbeVerdict.SOUND, "")
    # The probe allocates more memory than its matrices need.
    assert len(driver.memory[4096]) >= 3 * 4 * MATRIX_SIZE * MATRIX_SIZE
    assert driver.calls.index("cuModuleLoadData") < driver.calls.index("cuModuleGetFunction")
    assert driver.calls[-1] == "cuCtxSynchronize"


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (Driver(room_bytes=10**6), "cuda:0 failed: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, out of memory"),
        (
            Driver(launch=LAUNCH_FAILED),
            "cuda:0 failed: cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure",
        ),
    ],
)
def test_error_texts_of_the_driver_are_shown(driver: Driver, said: str) -> None:
    assert examine_device(CudaDevice(driver), name="cuda:0") == (ProbeVerdict.FAILED, said)


def test_device_that_cannot_be_opened_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.cuDevicePrimaryCtxRetain = lambda *_: LAUNCH_FAILED  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="cuDevicePrimaryCtxRetain: CUDA_ERROR_LAUNCH_FAILED"):
        CudaDevice(driver)


def test_driver_that_cannot_compile_gives_no_verdict() -> None:
    with pytest.raises(NoDriverError, match="CUDA_ERROR_JIT_COMPILER_NOT_FOUND"):
        examine_device(CudaDevice(Driver(launch=NO_COMPILER)), name="cuda:0")


SOUND, UNKNOWN, FAILED, WRONG = ProbeVerdict.SOUND, ProbeVerdict.UNKNOWN, ProbeVerdict.FAILED, ProbeVerdict.WRONG


# ---- the health of a device


def after(*answers: ProbeVerdict) -> DeviceHealth:
    health = DeviceHealth()
    for number, answer in enumerate(answers):
        before = health.fault
        changed = health.record_verdict(answer, f"answer {number}")
        assert changed == (health.fault != before)
    return health


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([], ""),
        ([SOUND], ""),
        ([FAILED], ""),
        ([FAILED, SOUND, FAILED], ""),
        ([FAILED, FAILED], "answer 1, twice"),
        ([WRONG, FAILED], "answer 1, twice"),
        ([FAILED, UNKNOWN, FAILED], "answer 2, twice"),  # a probe that could not run does not prove health
        ([FAILED, FAILED, FAILED], "answer 1, twice"),  # the fault is reported only once
        ([FAILED, FAILED, SOUND], "answer 1, twice"),
        ([FAILED, FAILED, SOUND, SOUND], ""),
        ([FAILED, FAILED, SOUND, FAILED, SOUND], "answer 1, twice"),
        ([FAILED, FAILED, SOUND, SOUND, FAILED, FAILED], "answer 5, twice"),
        ([WRONG, WRONG, SOUND, SOUND, SOUND], "answer 1, twice"),
    ],
)
def test_series_of_probe_verdicts_gives_the_expected_fault(answers: list[ProbeVerdict], fault: str) -> None:
    assert after(*answers).fault == fault


def test_fault_reported_by_the_driver_persists() -> None:
    health = DeviceHealth()
    assert health.record_driver_fault("Xid 79")
    assert not health.record_driver_fault("Xid 48")
    assert after(SOUND, SOUND).fault == ""
    for _ in range(3):
        assert not health.record_verdict(SOUND, "")
    assert health.fault == "Xid 79"


def test_unresponsive_driver_is_a_fault_until_it_responds() -> None:
    health = DeviceHealth()
    assert health.record_silence("no answer for 60 s")
    assert not health.record_silence("no answer for 60 s")
    assert (health.fault, health.is_known) == ("no answer for 60 s", True)
    assert health.record_silence("")
    assert health.fault == ""
    health.record_driver_fault("Xid 79")
    assert not health.record_silence("no answer for 60 s")
    assert not health.record_silence("")
    assert health.fault == "Xid 79"
