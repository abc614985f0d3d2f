"""What is injected into a program: the words in which the tables of fault types are written.

A *fault type* has a name, whose fault it is, and some injections. An injection says where in the program it strikes
(`data`, `compute`, `sync`, `save`, `start`), and how: user's code that really fails (`code`), an exception that a library
raises in the very words of that library (`raises`, at the place `library` in its source), or lines that the kernel, the
batch system or a daemon writes (`prints`), after which the program is gone (`dies`) or goes on to what it raises.

`{host}`, `{gpu}`, `{pid}`, `{job}`, `{bus}`, `{rank}`, `{user}`, `{clock}` are filled in by the seed.
"""

from __future__ import annotations

from typing import NamedTuple

INFRASTRUCTURE, FRAMEWORK, USER = "infrastructure", "framework", "user"


class Injection(NamedTuple):
    where: str
    code: str = ""
    raises: str = ""
    library: tuple[str, str, str] = ("", "", "")
    """Of what raises: its file below site-packages (or from /), its function, its line."""
    prints: tuple[str, ...] = ()
    dies: bool = False
    programs: tuple[str, ...] = ("vision", "language", "plain")


class FaultType(NamedTuple):
    name: str
    kind: str
    component: str
    injections: tuple[Injection, ...]


def raised(where: str, raises: str, file: str, function: str, line: str, *prints: str, only: str = "") -> Injection:
    """An exception in a library's own words, after the lines that it prints before."""
    return Injection(where, raises=raises, library=(file, function, line), prints=prints, programs=_programs(only))


def coded(where: str, code: str, *, only: str = "") -> Injection:
    """User's code that fails when it runs."""
    return Injection(where, code=code, programs=_programs(only))


def killed(*prints: str, where: str = "compute", only: str = "") -> Injection:
    """Lines of others, and no word more of the program."""
    return Injection(where, prints=prints, dies=True, programs=_programs(only))


def _programs(only: str) -> tuple[str, ...]:
    return tuple(only.split()) if only else ("vision", "language", "plain")


TORCH_ONLY = "vision language"
C10D = ("torch/distributed/distributed_c10d.py", "all_reduce", "work = group.allreduce([tensor], opts)")
LOGGER = ("torch/distributed/c10d_logger.py", "wrapper", "return func(*args, **kwargs)")
LINEAR = ("torch/nn/modules/linear.py", "forward", "return F.linear(input, self.weight, self.bias)")
BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward", "return Variable._execution_engine.run_backward(")
SERIAL = ("torch/serialization.py", "__init__", "super().__init__(torch._C.PyTorchFileWriter(self.name))")
