"""Run the programs, with and without each injection, and record their output.

One process imports PyTorch and Transformers and forks for each run. A line `MARK`, later removed, precedes the first
line of an injection or the last exception, which is the label.
"""

from __future__ import annotations

import linecache
import os
import random
import re
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import corpora
from benchmarks.papers.schedmate.failures.corpus import RECORDED, TYPES, Injection, Run

_TEXTS = msgspec.toml.decode(Path(__file__).with_name("programs.toml").read_bytes(), type=dict[str, str])
PROGRAMS = {name: _TEXTS["common"] + _TEXTS[name] for name in ("vision", "language", "plain")}
ON_CLUSTERS = {name: _TEXTS["cluster_common"] + _TEXTS[f"on_{name}"] for name in ("slurm", "mpi")}
FUNCTIONS = {"data": "read_batch", "compute": "forward", "sync": "average", "save": "save", "start": "prepare"}
LOG_FORMATS = (
    "%(asctime)s %(levelname)s %(name)s: %(message)s",
    "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s",
    "%(levelname)s:%(name)s:%(message)s",
    "%(message)s",
)
MARK = "\x1e--fault--"
PACKAGES = "/opt/conda/lib/python3.11/site-packages/"
USERS = ("ada", "grace", "linus", "barbara")
_HERE = re.compile(r"/[\w./-]+/lib/python3\.\d+/(?=\S+\.py)")


def record() -> None:
    import torch
    import transformers  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    torch.set_num_threads(1)
    runs: list[Run] = []
    for program in PROGRAMS:
        runs += [_run("", program, None, seed) for seed in range(6)]
    for fault in TYPES:
        for at, injection in enumerate(fault.injections):
            for program in injection.programs:
                runs.append(_run(fault.name, program, injection, hash_of(f"{fault.name} {at} {program}")))
                print(fault.name, program, runs[-1].truth, len(runs[-1].lines), flush=True)
    corpora.write(RECORDED, msgspec.msgpack.encode(runs))


def hash_of(text: str) -> int:
    return random.Random(text).randrange(1 << 30)


def _run(fault: str, program: str, injection: Injection | None, seed: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        child = os.fork()
        if child == 0:
            _run_program(program, injection, random.Random(seed), seed, out, folder)
        os.waitpid(child, 0)
        text = out.read_text("utf-8", "replace").replace(folder, "/scratch/run")
    return _labelled(fault, program, text.split("\n"))


def _labelled(fault: str, program: str, lines: list[str]) -> Run:
    while lines and not lines[-1]:
        lines.pop()
    found: list[str] = []
    truth = -1
    for line in lines:
        if line.endswith(MARK):
            if line != MARK:  # A progress bar has no line break.
                found.append(line.removesuffix(MARK))
            truth = len(found) if truth < 0 else truth
        elif "return _raise(step)  # " in line:
            found.append(line.replace("return _raise(step)  # ", ""))
        elif not (
            found and line.strip().strip("^") == "" and line.strip() and "_raise" in lines[lines.index(line) - 1]
        ):
            found.append(_HERE.sub("/opt/conda/lib/python3.11/", line))
    if truth == len(found):
        truth -= 1  # An option parser prints its message before the mark.
    return Run(fault, program, truth, found)


def _run_program(
    program: str, injection: Injection | None, chance: random.Random, seed: int, out: Path, folder: str
) -> None:
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    random.seed(seed)
    user, steps = chance.choice(USERS), chance.randrange(160, 420)
    place = f"/home/{user}/{chance.choice(('project', 'llm-pretrain', 'thesis/code', 'vit'))}/"
    names = {
        "LOG_FORMAT": chance.choice(LOG_FORMATS), "SEED": seed, "STEPS": steps, "FOLDER": folder,
        "__name__": "__main__",
    }  # fmt: skip
    try:
        try:
            _execute_source(PROGRAMS[program], place + "train.py", names)
            if injection is not None:
                _inject_fault(injection, names, chance, steps, place, user)
            exec(_compile_source("main()", place + "train.py", line=chance.randrange(120, 200)), names)
        except BaseException as error:
            _print_traceback(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _inject_fault(
    injection: Injection, names: dict[str, Any], chance: random.Random, steps: int, place: str, user: str
) -> None:
    function = FUNCTIONS[injection.where]
    good, strikes = names[function], chance.randrange(60, steps - 20)
    filled = _placeholder_filler(chance, user)
    module = place + {"data": "data.py", "compute": "model.py", "save": "checkpoint.py"}.get(
        injection.where, "train.py"
    )

    def write(lines: tuple[str, ...]) -> None:
        if lines:
            sys.stdout.flush()
            print(MARK)
            for line in lines:
                print(filled(line), flush=True)

    names |= {
        "_good": good,
        "_strikes": strikes,
        "_write": lambda: write(injection.prints),
        "_die": lambda: os._exit(1),
    }
    names["_raise"] = _raising_function(injection, filled) if injection.raises else None
    body = injection.code or ("_die()" if injection.dies else "return _raise(step)")
    late = {"start": "", "save": ""}.get(
        injection.where, "    if step < _strikes: return _good(step, *args, **kwargs)\n"
    )
    source = f"def {function}(step, *args, **kwargs):\n{late}"
    source += "    _write()\n" if injection.prints else ""
    source += textwrap.indent(filled(body) if "{user}" in body else body, "    ") + "\n"
    if not injection.code:
        shown = {
            "data": "sample = self.source.read(index)",
            "compute": "outputs = self.model(**inputs)",
            "sync": "self.group.all_reduce(self.flat)",
            "save": "self.storage.write(state, path)",
            "start": "backend = self.connect(options)",
        }[injection.where]
        source = source.replace("return _raise(step)", f"return _raise(step)  # {shown}")
    _execute_source(source, module, names, line=chance.randrange(20, 90))


def _raising_function(injection: Injection, filled: Any) -> Any:
    file, function, line = injection.library
    file = file if file.startswith("/") else (PACKAGES if "/" in file else "/opt/conda/lib/python3.11/") + file
    called = function if function.isidentifier() else "load"
    scope: dict[str, Any] = {"_error": _error_of(filled(injection.raises))}
    number = random.Random(line).randrange(80, 2400)
    code = compile("\n" * (number - 2) + f"def {called}(*args):\n    raise _error", file, "exec")
    linecache.cache[file] = (1, None, ["\n"] * (number - 1) + [f"    {line}\n"], file)
    exec(code, scope)
    return scope[called]


def _error_of(text: str) -> BaseException:
    if "|" not in text:
        kind, number, *file = text.split(":", 2)
        if kind == "socket.gaierror":
            import socket

            return socket.gaierror(-3, "Temporary failure in name resolution")
        return OSError(int(number), os.strerror(int(number)), *file)
    kind, message = text.split("|", 1)
    module, _, name = kind.rpartition(".")
    found: object = getattr(sys.modules.get(module or "builtins"), name, None)
    named: type[BaseException] = type(name, (RuntimeError,), {"__module__": module})
    try:
        return (found if isinstance(found, type) and issubclass(found, BaseException) else named)(message)
    except TypeError:
        return named(message)


def _placeholder_filler(chance: random.Random, user: str) -> Any:
    values = {
        "host": f"{chance.choice(('node', 'gpu', 'cn', 'dgx'))}{chance.randrange(1, 400):03d}", "gpu": str(chance.randrange(8)),
        "pid": str(chance.randrange(20000, 990000)), "job": str(chance.randrange(100000, 9999999)),
        "bus": f"0000:{chance.randrange(16, 255):02x}:00.0", "rank": str(chance.randrange(4)), "user": user,
        "clock": f"{chance.randrange(10000, 9000000)}.{chance.randrange(1000000):06d}",
    }  # fmt: skip

    def fill(text: str) -> str:
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        return text

    return fill


def _compile_source(source: str, file: str, line: int = 1) -> Any:
    entry = linecache.cache.get(file, ())
    known = entry[2] if len(entry) == 4 else []
    lines = [*known, *["\n"] * max(0, line - 1 - len(known))]
    first = len(lines)
    lines += source.splitlines(keepends=True)
    linecache.cache[file] = (1, None, lines, file)
    return compile("\n" * first + source, file, "exec")


def _execute_source(source: str, file: str, names: dict[str, Any], line: int = 1) -> None:
    exec(_compile_source(source, file, line), names)


def _print_traceback(error: BaseException) -> None:
    sys.stdout.flush()
    here = error.__traceback__
    while here is not None and here.tb_frame.f_code.co_filename == __file__:
        here = here.tb_next
    print(MARK, file=sys.stderr)
    if isinstance(error, SystemExit):
        return
    traceback.print_exception(type(error), error, here)
