"""What is asked of the CUDA driver: the right functions with the right arguments, over a driver that is Python."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import pytest

from stoker.pilot.core.events import ProbeVerdict
from stoker.pilot.devices.probe import SIZE, DeviceError, Gpu, NoDriverError, examine

OUT_OF_MEMORY, NO_COMPILER, LAUNCH_FAILED = 2, 221, 719
NAMES = {
    OUT_OF_MEMORY: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    NO_COMPILER: (b"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", b"PTX JIT compiler library not found"),
    LAUNCH_FAILED: (b"CUDA_ERROR_LAUNCH_FAILED", b"unspecified launch failure"),
}


class Driver:
    """Keeps what is on the device in buffers of this process, by made-up addresses; multiplies like the kernel."""

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
        assert blocks * rest[2] >= size * size  # a thread an element
        left, right = array("f", bytes(self.memory[a])), array("f", bytes(self.memory[b]))
        columns = [right[j::size] for j in range(size)]
        rows: dict[bytes, list[float]] = {}
        out = array("f")
        for i in range(size):
            row = left[i * size : (i + 1) * size]
            if row.tobytes() not in rows:
                rows[row.tobytes()] = [sum(map(float.__mul__, row, column)) for column in columns]
            out.extend(rows[row.tobytes()])
        self.memory[c][:] = out.tobytes()
        return self.launch


def test_a_product_through_the_driver() -> None:
    driver = Driver()
    assert examine(Gpu(driver), name="cuda:0") == (ProbeVerdict.SOUND, "")
    assert len(driver.memory[4096]) >= 3 * 4 * SIZE * SIZE  # more than the matrices was asked for
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
def test_the_drivers_own_words(driver: Driver, said: str) -> None:
    assert examine(Gpu(driver), name="cuda:0") == (ProbeVerdict.FAILED, said)


def test_a_device_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.cuDevicePrimaryCtxRetain = lambda *_: LAUNCH_FAILED  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="cuDevicePrimaryCtxRetain: CUDA_ERROR_LAUNCH_FAILED"):
        Gpu(driver)


def test_a_driver_that_cannot_compile_says_nothing_of_the_device() -> None:
    with pytest.raises(NoDriverError, match="CUDA_ERROR_JIT_COMPILER_NOT_FOUND"):
        examine(Gpu(Driver(launch=NO_COMPILER)), name="cuda:0")
