"""`python -P -m stoker.pilot.devices.probe DEVICE` tests whether a GPU computes correctly; exits with a `ProbeVerdict`.

The probe multiplies two matrices in single precision and checks every element of the product. The matrices are A[i][k]
= a[i] + b[k] and B[k][j] = c[k] + d[j] with small integers, so the product has a closed form:

    C[i][j] = a[i] * sum(c) + n * a[i] * d[j] + sum(b * c) + d[j] * sum(b)

A healthy device returns the exact product, because every partial sum is an integer below 2^24. The driver compiles the
kernel (PTX), because a node may lack PyTorch, and PyTorch starts slowly.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Mapping
from typing import Any

from stoker.pilot.core.events import ProbeVerdict
from stoker.units import show_signal

# ---- the device

_ROOM_BYTES = 64 * 1024 * 1024  # bytes of device memory that the probe fills in addition to the matrices
_PATTERN = 0xA5A5A5A5
_THREADS_PER_BLOCK = 256
_COMPILE_ERRORS = frozenset({209, 218, 220, 221, 222, 223})
"""Driver errors that mean a missing compiler (in some containers) or an old compiler. The device may be healthy."""
_PTX = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry product(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u32 pn)
{
    .reg .pred %p<3>;
    .reg .f32 %f<4>;
    .reg .b32 %r<10>;
    .reg .b64 %a<10>;
    ld.param.u64 %a1, [pa];
    ld.param.u64 %a2, [pb];
    ld.param.u64 %a3, [pc];
    ld.param.u32 %r1, [pn];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;      // the element: row * n + column
    mul.lo.u32 %r6, %r1, %r1;
    setp.ge.u32 %p1, %r5, %r6;
    @%p1 bra DONE;
    div.u32 %r7, %r5, %r1;
    rem.u32 %r8, %r5, %r1;
    cvta.to.global.u64 %a1, %a1;
    cvta.to.global.u64 %a2, %a2;
    cvta.to.global.u64 %a3, %a3;
    mul.lo.u32 %r9, %r7, %r1;
    mul.wide.u32 %a4, %r9, 4;
    add.u64 %a4, %a1, %a4;              // the row's first element in A
    mul.wide.u32 %a5, %r8, 4;
    add.u64 %a5, %a2, %a5;              // the column's first element in B
    mul.wide.u32 %a6, %r1, 4;
    mov.f32 %f1, 0f00000000;
    mov.u32 %r9, 0;
NEXT:
    ld.global.f32 %f2, [%a4];
    ld.global.f32 %f3, [%a5];
    fma.rn.f32 %f1, %f2, %f3, %f1;
    add.u64 %a4, %a4, 4;
    add.u64 %a5, %a5, %a6;
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p2, %r9, %r1;
    @%p2 bra NEXT;
    mul.wide.u32 %a7, %r5, 4;
    add.u64 %a7, %a3, %a7;
    st.global.f32 [%a7], %f1;
DONE:
    ret;
}
"""


class DeviceError(Exception):
    """The device refused an operation, or an operation failed."""


class NoDriverError(Exception):
    """The device cannot be tested: no driver, no visible GPU, or no compiler for the kernel."""


class CudaDevice:
    """The first GPU that this process sees, with a CUDA context."""

    def __init__(self, driver: Any) -> None:
        self._call = functools.partial(call_driver, driver)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def multiply(self, a: array[float], b: array[float], size: int) -> array[float]:
        """Return the product of two square matrices, row by row. Raises DeviceError."""
        room = self._allocate(_ROOM_BYTES)
        self._call("cuMemsetD32_v2", room, ctypes.c_uint32(_PATTERN), ctypes.c_size_t(_ROOM_BYTES // 4))
        length = size * size * a.itemsize
        places = [self._allocate(length) for _ in range(3)]
        for place, matrix in zip(places, (a, b), strict=False):
            self._call("cuMemcpyHtoD_v2", place, ctypes.c_void_p(matrix.buffer_info()[0]), ctypes.c_size_t(length))
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), _PTX)
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, b"product")
        given = [*places, ctypes.c_uint32(size)]
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
        blocks = -(-size * size // _THREADS_PER_BLOCK)
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, _THREADS_PER_BLOCK, 1, 1, 0, None, pointers, None)
        self._call("cuCtxSynchronize")
        out = array("f", bytes(length))
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.buffer_info()[0]), places[2], ctypes.c_size_t(length))
        return out

    def _allocate(self, count: int) -> ctypes.c_uint64:
        place = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(count))
        return place


def call_driver(driver: Any, name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver. Raises DeviceError with the driver's message, or NoDriverError."""
    function = getattr(driver, name, None)
    if function is None:
        raise NoDriverError(f"the driver has no {name}")
    code = function(*arguments)
    if code:
        word, text = ctypes.c_char_p(), ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(word))
        driver.cuGetErrorString(code, ctypes.byref(text))
        known = f"{(word.value or b'').decode()}, {(text.value or b'').decode()}" if word.value else f"error {code}"
        kind = NoDriverError if code in _COMPILE_ERRORS else DeviceError
        raise kind(f"{name.partition('_')[0]}: {known}")


def open_first_gpu() -> CudaDevice:
    """Raises NoDriverError, DeviceError."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDriverError(str(error)) from error
    call_driver(driver, "cuInit", 0)
    count = ctypes.c_int()
    call_driver(driver, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise NoDriverError("the driver shows no GPU to this process")
    return CudaDevice(driver)


# ---- the probe

MATRIX_SIZE = 512  # number of rows and columns of each matrix
_LIMIT_S = 120  # the probe exits after this many seconds, because its parent process may have died


def examine_device(computer: CudaDevice, *, name: str) -> tuple[ProbeVerdict, str]:
    """Return the verdict on a device, and a message if it does not compute correctly."""
    size = MATRIX_SIZE
    a, d = [float(i % 7 - 3) for i in range(size)], [float(j % 5 - 2) for j in range(size)]
    b, c = [float(k % 4 - 1) for k in range(size)], [float(k % 6 - 2) for k in range(size)]
    left = array("f", (ai + bk for ai in a for bk in b))
    right = array("f", (ck + dj for ck in c for dj in d))
    try:
        product = computer.multiply(left, right, size)
    except DeviceError as refused:
        return ProbeVerdict.FAILED, f"{name} failed: {refused}"
    sum_b, sum_c, sum_bc = sum(b), sum(c), sum(map(float.__mul__, b, c))
    expected = (ai * sum_c + size * ai * dj + sum_bc + dj * sum_b for ai in a for dj in d)
    if wrong := sum(map(float.__ne__, product, expected)):
        return ProbeVerdict.WRONG, f"{name} gave a wrong matrix product ({wrong:,} of {size**2:,} elements are wrong)"
    return ProbeVerdict.SOUND, ""


PROBE_LIMIT_S = 60.0


def run_probe(
    command: tuple[str, ...], name: str, environ: Mapping[str, str] | None = None
) -> tuple[ProbeVerdict, str]:
    """Run a command that probes a device. Return the verdict and the last line that it printed."""
    try:
        process = subprocess.Popen(
            [*command, name], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {}), "STOKER_DEVICE": name}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return ProbeVerdict.UNKNOWN, f"the probe of {name} could not be started: {error}"
    try:
        output, _ = process.communicate(timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait, because the driver may block the end of the process
        return ProbeVerdict.FAILED, f"{name} failed: its probe did not end within {PROBE_LIMIT_S:g} s"
    said = output.decode(errors="replace").strip().splitlines()
    code = process.returncode
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return ProbeVerdict.UNKNOWN, f"the probe of {name} was killed by a signal"
    if code in [answer.value for answer in ProbeVerdict]:
        answer = ProbeVerdict(code)
        return answer, "" if answer is ProbeVerdict.SOUND else said[-1] if said else f"{name} failed its probe"
    how = show_signal(-code) if code < 0 else f"exit code {code}"
    return ProbeVerdict.FAILED, f"{name} failed: its probe exited with {how}" + (f": {said[-1]}" if said else "")


def main(arguments: list[str]) -> int:
    signal.alarm(_LIMIT_S)
    name = arguments[0]
    try:
        answer, said = examine_device(open_first_gpu(), name=name)
    except NoDriverError as error:
        answer, said = ProbeVerdict.UNKNOWN, f"{name} cannot be probed: {error}"
    except DeviceError as error:
        answer, said = ProbeVerdict.FAILED, f"{name} failed: {error}"
    except Exception as error:  # a bug in the probe does not mean that the device is faulty
        answer, said = ProbeVerdict.UNKNOWN, f"{name} cannot be probed: {type(error).__name__}: {error}"
    if said:
        print(said)  # noqa: T201  # the answer
    return answer.value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
