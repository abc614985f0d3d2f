"""`python -P -m stoker.pilot.devices.probe DEVICE`: does a device still compute? Run for a moment, by itself.

It allocates memory, multiplies two matrices in single precision, and looks at every element of the product. The
matrices are A[i][k] = a[i] + b[k] and B[k][j] = c[k] + d[j] with small whole numbers, so the product is known in closed
form,

    C[i][j] = a[i] * sum(c) + n * a[i] * d[j] + sum(b * c) + d[j] * sum(b)

and, because every sum along the way is a whole number below 2^24, a sound device gives it without any error. A broken
one (a bad memory cell, a multiplier that fails when hot) is typically off by far more than what is allowed.

It says what is wrong on standard output, in a line; its exit code is a `ProbeVerdict`.
"""

from __future__ import annotations

import signal
import sys
from array import array
from typing import Protocol

from stoker.pilot.core.events import ProbeVerdict
from stoker.pilot.devices.cuda import DeviceError, NoDriverError, open_first

SIZE = 512
"""Rows and columns of the matrices."""
ALLOWED = 1e-3
"""The largest relative error of an element."""
_LIMIT_S = 120
"""Who started it waits less long; should that one have died, it ends by itself."""


class Computer(Protocol):
    """What multiplies."""

    def product(self, a: array[float], b: array[float], size: int) -> array[float]:
        """The product of two square matrices, row by row, computed on the device. Raises DeviceError."""


def examine(computer: Computer, *, name: str) -> tuple[ProbeVerdict, str]:
    """Whether a device computes rightly; if it does not, what is wrong."""
    size = SIZE
    a, d = [float(i % 7 - 3) for i in range(size)], [float(j % 5 - 2) for j in range(size)]
    b, c = [float(k % 4 - 1) for k in range(size)], [float(k % 6 - 2) for k in range(size)]
    left = array("f", (ai + bk for ai in a for bk in b))
    right = array("f", (ck + dj for ck in c for dj in d))
    try:
        product = computer.product(left, right, size)
    except DeviceError as refused:
        return ProbeVerdict.FAILED, f"{name} failed: {refused}"
    error = _error(product, a=a, b=b, c=c, d=d)
    if error <= ALLOWED:
        return ProbeVerdict.SOUND, ""
    return ProbeVerdict.WRONG, f"{name} gave a wrong matrix product (error {_short(error)}, allowed {_short(ALLOWED)})"


def _error(product: array[float], *, a: list[float], b: list[float], c: list[float], d: list[float]) -> float:
    """The largest relative error of an element; a value that is no number counts as 1."""
    size, sum_b, sum_c = len(a), sum(b), sum(c)
    sum_bc = sum(bk * ck for bk, ck in zip(b, c, strict=True))
    worst = 0.0
    for i, ai in enumerate(a):
        row = product[i * size : (i + 1) * size]
        for got, dj in zip(row, d, strict=True):
            right = ai * sum_c + size * ai * dj + sum_bc + dj * sum_b
            if got != right:
                off = abs(got - right) / max(1.0, abs(right))
                worst = max(worst, off if off == off else 1.0)
    return worst


def _short(number: float) -> str:
    """`3e-1`."""
    digit, _, power = f"{number:.0e}".partition("e")
    return f"{digit}e{int(power)}" if power else digit


def main(arguments: list[str]) -> int:
    """Probe the one GPU that this process sees."""
    signal.alarm(_LIMIT_S)
    name = arguments[0]
    try:
        answer, said = examine(open_first(), name=name)
    except NoDriverError as error:
        answer, said = ProbeVerdict.UNKNOWN, f"{name} cannot be probed: {error}"
    except DeviceError as error:
        answer, said = ProbeVerdict.FAILED, f"{name} failed: {error}"
    except Exception as error:  # a fault of ours says nothing of the device
        answer, said = ProbeVerdict.UNKNOWN, f"{name} cannot be probed: {type(error).__name__}: {error}"
    if said:
        print(said)  # noqa: T201  # this is the answer
    return answer.value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
