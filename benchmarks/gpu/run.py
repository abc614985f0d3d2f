"""`python benchmarks/gpu/run.py`: run the parts of `make gpu`; write a record (JSON) and a page (Markdown).

This file runs before the installation: it uses only the standard library and installs packages from `.gpu-kit`.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import budget  # noqa: E402
from benchmarks.gpu.bars import bars, render  # noqa: E402
from benchmarks.gpu.budget import IN_ALL_S, KIT, PARTS, allowed_s, with_needs  # noqa: E402

Numbers = dict[str, Any]
Outcome = tuple[str, str, Numbers]
"""Status, reason, and numbers by name."""
_PR_SET_PDEATHSIG = 1
_IMPORTS = """
import time; began = time.perf_counter()
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM
torch.ones(1, device="cuda:0" if torch.cuda.is_available() else "cpu").sum().item()
print(time.perf_counter() - began)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} [all]")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--kit", type=Path, default=ROOT / ".gpu-kit", help="wheels to install from")
    parser.add_argument("--commit", default="", help="commit of the sources, if this is not a repository")
    parser.add_argument("--rehearse", action="store_true", help="run on CPUs, with tiny models")
    asked = parser.parse_args()
    if unknown := [name for name in asked.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    return Run(asked).all()


class Run:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.out: Path = asked.out.resolve()
        self.work = self.out / "work"
        self.asked = asked
        self.names = with_needs(asked.parts or list(PARTS))
        self.began = time.monotonic()
        self.ends_at = self.began + IN_ALL_S
        for folder in (self.out / "logs", self.work):
            folder.mkdir(parents=True, exist_ok=True)
        for name in PARTS:  # Remove old numbers, because parts may read numbers of other parts of this run.
            (self.work / f"{name}.json").unlink(missing_ok=True)
        self.record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "rehearsal": asked.rehearse,
            "machine": f"{_devices()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "commit": asked.commit or _output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown",
            "seconds": 0.0, "counts": {}, "bars": [], "parts": [],
        }  # fmt: skip
        self.environ = self._environment()

    def all(self) -> int:
        self._part("kit", KIT.title, self._install)
        for at, name in enumerate(self.names):
            allowed = allowed_s(name, left_s=self.ends_at - time.monotonic(), later=self.names[at + 1 :])
            self._part(name, PARTS[name].title, partial(self._measure, name, allowed))
        print(f"{self.out / 'record.json'}\n{self.out / 'page.md'}")
        return int(any(part["status"] in ("failed", "too slow") for part in self.record["parts"]))

    def _part(self, name: str, title: str, work: Callable[[], Outcome]) -> None:
        began = self._part_began = time.monotonic()
        part: dict[str, Any] = {
            "name": name, "title": title, "status": "running", "seconds": 0.0, "why": "", "numbers": {},
        }  # fmt: skip
        self.record["parts"].append(part)
        self._write()
        try:
            status, why, numbers = work()
        except Exception as error:  # The next part may succeed.
            status, why, numbers = "failed", f"{type(error).__name__}: {error}", part["numbers"]
        part |= {"status": status, "why": why, "numbers": numbers, "seconds": time.monotonic() - began}
        self._write()
        print(f"{name:9} {status:11} {part['seconds']:6.1f} s  {why}", flush=True)

    def _write(self) -> None:
        self.record["seconds"] = time.monotonic() - self.began
        statuses = [each["status"] for each in self.record["parts"]]
        self.record["counts"] = {each: statuses.count(each) for each in dict.fromkeys(statuses)}
        self.record["bars"] = bars(self.record)
        for file, text in (("record.json", json.dumps(self.record, indent=1) + "\n"), ("page.md", render(self.record))):
            draft = self.out / f"{file}.new"
            draft.write_text(text)
            draft.replace(self.out / file)

    def _measure(self, name: str, allowed: float) -> Outcome:
        if not allowed:
            return "not reached", f"{self.ends_at - time.monotonic():.0f} s were left", {}
        return self._suite(name, allowed) if name in ("site", "tests") else self._side(name, allowed)

    def _install(self) -> Outcome:
        numbers: Numbers = {}
        with (self.out / "logs" / "imports.log").open("wb") as log:
            imports = self._start(["-c", _IMPORTS], log, self.environ)
        try:
            outcome = self._install_wheels(numbers)
            imports.wait(max(1.0, min(KIT.limit_s, self.ends_at - time.monotonic())))
            if imports.returncode == 0:
                numbers["first import of torch and transformers, s"] = float(self._tail("imports"))
            elif outcome[0] == "ok":
                outcome = ("failed", f"torch or transformers: {self._tail('imports')}", numbers)
        except subprocess.TimeoutExpired:
            outcome = ("too slow", "torch and transformers were not imported in time", numbers)
        finally:
            _end_process_group(imports)
        return outcome

    def _install_wheels(self, numbers: Numbers) -> Outcome:
        wheels = sorted(self.asked.kit.glob("*.whl"))
        missing = [str(wheel) for wheel in wheels if not _has(wheel.name.split("-")[0])]
        words = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(self.out / "site")]
        imports = "import zmq, msgspec, parsl, cloudpickle, psutil, click, rich, pytest"
        for what, step, advice in (
            ("pip", ["-m", "pip", "install", *words, *missing] if missing else [], ""),
            ("the imports", ["-c", imports], "; take wheels along: make gpu-kit"),
        ):
            code = self._run("kit", step, limit_s=60.0) if step else 0
            if code is None:
                return "too slow", f"{what} did not end: {self._tail('kit')}", numbers
            if code:
                return "failed", f"{what} ended with code {code}: {self._tail('kit')}{advice}", numbers
        return "ok", f"{len(missing)} of {len(wheels)} wheels installed", numbers

    def _side(self, name: str, limit_s: float) -> Outcome:
        answer = self.work / f"{name}.json"

        def numbers() -> Numbers:
            return dict(_read(answer).get("numbers", {}))

        words = ["-m", "benchmarks.gpu.parts", name, str(answer), "--work", str(self.work)]
        code = self._run(name, [*words, "--seconds", f"{limit_s:.0f}"], limit_s=limit_s, numbers=numbers)
        if skipped := _read(answer).get("skipped", ""):
            return "skipped", skipped, numbers()
        if code is None:
            return "too slow", f"it did not end within {limit_s:.0f} s: {self._tail(name)}", numbers()
        return ("failed", f"exit code {code}: {self._tail(name)}", numbers()) if code else ("ok", "", numbers())

    def _suite(self, name: str, limit_s: float) -> Outcome:
        suite = budget.site_suite(name, root=ROOT, work=self.work, rehearse=self.asked.rehearse)
        if suite.missing:
            return "failed", suite.missing, {}
        log = self.out / "logs" / f"{name}.log"
        # GPU tests with the stand-in driver would prove nothing. In a rehearsal these tests find no GPU.
        plain = self._environment(stands_in=False)
        words = ["-m", "pytest", *suite.words, "-o", f"cache_dir={self.work / 'pytest'}"]
        code = self._run(
            name, words, limit_s=limit_s, environ=plain, how=signal.SIGINT, numbers=lambda: suite.numbers(log)
        )
        if code is None:
            return "too slow", f"they did not end within {limit_s:.0f} s", suite.numbers(log)
        return *suite.verdict(code, log), suite.numbers(log)

    def _environment(self, *, stands_in: bool = True) -> dict[str, str]:
        """`stands_in`: a rehearsal gets two GPUs of a stand-in driver."""
        stands_in &= self.asked.rehearse
        path = [self.out / "site", ROOT / "src", ROOT, ROOT / "tests"]
        words = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        if stands_in:
            words.insert(0, str(ROOT / "tests" / "driver"))
        environ = {
            **os.environ, "PYTHONPATH": os.pathsep.join(words), "STOKER_HOME": str(self.work / "home"),
            "STOKER_SCRATCH": str(self.work / "scratch"), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **({"STOKER_GPU_REHEARSAL": "1"} if self.asked.rehearse else {}),
        }  # fmt: skip
        if stands_in:
            gpus = [{"uuid": f"GPU-{n}", "name": "stand-in", "memory": 24 * 10**9} for n in range(2)]
            (self.work / "use.d").mkdir(exist_ok=True)
            (self.work / "nvml.json").write_text(json.dumps({"gpus": gpus}))
            environ["STANDIN_NVML"] = str(self.work / "nvml.json")
        return environ

    def _run(
        self, name: str, words: list[str], *, limit_s: float, environ: dict[str, str] | None = None,
        how: int = signal.SIGTERM, numbers: Callable[[], Numbers] | None = None,
    ) -> int | None:  # fmt: skip
        until = min(time.monotonic() + limit_s, max(time.monotonic() + 1.0, self.ends_at))
        with (self.out / "logs" / f"{name}.log").open("wb") as log:
            process = self._start(words, log, environ or self.environ)
        try:
            while (left_s := until - time.monotonic()) > 0:
                try:
                    return process.wait(min(1.0, left_s))
                except subprocess.TimeoutExpired:
                    if numbers is not None:
                        seconds = time.monotonic() - self._part_began
                        self.record["parts"][-1] |= {"numbers": numbers(), "seconds": seconds}
                        self._write()
            return None
        finally:
            _end_process_group(process, how=how)

    def _start(self, words: list[str], log: Any, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip

    def _tail(self, name: str) -> str:
        lines = (self.out / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it said nothing"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_process_group(process: subprocess.Popen[bytes], *, how: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        os.kill(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(8.0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {}


def _has(name: str) -> bool:
    with suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


def _output_of(*words: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return ""


def _devices() -> str:
    names = [name.strip() for name in _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").split("\n")]
    counts = {name: names.count(name) for name in names if name}
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()) or "no GPU"


if __name__ == "__main__":
    sys.exit(main())
