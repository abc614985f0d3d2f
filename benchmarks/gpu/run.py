"""`python benchmarks/gpu/run.py`: the parts one after the other, a record (JSON) and a page (Markdown) of them.

Uses the standard library alone, and installs what is missing from `.gpu-kit` into its own folder. A part that fails,
hangs or cannot run here is a line in the record, and the next one begins. The record is written after each part, so
that a run that is cut off leaves what it has.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.page import render  # noqa: E402

IN_ALL_S = 470.0
PARTS: dict[str, tuple[str, float]] = {
    "device": ("what is here, and how fast it is by itself", 60.0),
    "probe": ("Stoker's own look at the devices", 40.0),
    "tests": ("tests with the marker gpu", 120.0),
    "model": ("a model with random weights is made", 60.0),
    "load": ("contexts are loaded: from the source, again, and from a snapshot", 150.0),
    "tokens": ("text is generated", 110.0),
    "zygote": ("from a call to the first operation on the device", 60.0),
    "memory": ("the ledger against NVML", 80.0),
    "faults": ("a call without memory, a killed library", 60.0),
    "gang": ("two devices exchange numbers (NCCL)", 60.0),
    "tune": ("soft prompts are tuned", 60.0),
}
"""What each part is about, and how many seconds it may take."""


def main() -> int:
    """Run; exit code 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} [all]")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--kit", type=Path, default=ROOT / ".gpu-kit", help="wheels to install from")
    parser.add_argument("--size", type=float, default=4e9, metavar="BYTES", help="of the model [%(default)g]")
    parser.add_argument("--commit", default="", help="of the sources, where they lie without their repository")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, over a stand-in for its driver")
    asked = parser.parse_args()
    unknown = [name for name in asked.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    return Run(asked).all()


class Run:
    """One run."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.out: Path = asked.out.resolve()
        self.work = self.out / "work"
        self.asked = asked
        self.began = time.monotonic()
        self.ends_at = self.began + IN_ALL_S
        for folder in (self.out / "logs", self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "rehearsal": asked.rehearse,
            "machine": f"{_devices()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "commit": asked.commit or _commit(), "seconds": 0.0, "counts": {}, "parts": [],
        }  # fmt: skip
        self.environ = self._environment()

    def all(self) -> int:
        """Every part that was asked for."""
        self._part("kit", "what is missing is installed", self._install)
        for name in self.asked.parts or PARTS:
            title, limit_s = PARTS[name]
            work = self._tests if name == "tests" else self._side
            self._part(name, title, lambda name=name, limit_s=limit_s, work=work: work(name, limit_s))
        print(f"{self.out / 'record.json'}\n{self.out / 'page.md'}")
        return int(any(part["status"] in ("failed", "too slow") for part in self.record["parts"]))

    def _part(self, name: str, title: str, work: Callable[[], tuple[str, str, dict[str, Any]]]) -> None:
        began = time.monotonic()
        try:
            status, why, numbers = work()
        except Exception as error:  # the next part may well work
            status, why, numbers = "failed", f"{type(error).__name__}: {error}", {}
        seconds = time.monotonic() - began
        part = {"name": name, "title": title, "status": status, "seconds": seconds, "why": why, "numbers": numbers}
        self.record["parts"].append(part)
        self.record["seconds"] = time.monotonic() - self.began
        statuses = [each["status"] for each in self.record["parts"]]
        self.record["counts"] = {each: statuses.count(each) for each in dict.fromkeys(statuses)}
        (self.out / "record.json").write_text(json.dumps(self.record, indent=1) + "\n")
        (self.out / "page.md").write_text(render(self.record))
        print(f"{name:8} {status:9} {seconds:6.1f} s  {why}", flush=True)

    # ---- what parts run in

    def _environment(self) -> dict[str, str]:
        path = [self.out / "site", ROOT / "src", ROOT, ROOT / "tests"]
        if self.asked.rehearse:
            path.insert(0, ROOT / "tests" / "driver")
        words = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {
            **os.environ, "PYTHONPATH": os.pathsep.join(words), "STOKER_HOME": str(self.work / "home"),
            "STOKER_SCRATCH": str(self.work / "scratch"), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        if self.asked.rehearse:
            gpus = [{"uuid": f"GPU-{n}", "name": "stand-in", "memory": 24 * 10**9} for n in range(2)]
            (self.work / "use.d").mkdir(exist_ok=True)
            (self.work / "nvml.json").write_text(json.dumps({"gpus": gpus}))
            environ |= {"STANDIN_NVML": str(self.work / "nvml.json"), "STOKER_GPU_REHEARSAL": "1"}
        return environ

    def _install(self) -> tuple[str, str, dict[str, Any]]:
        """Wheels of what this Python lacks."""
        wheels = sorted(self.asked.kit.glob("*.whl"))
        missing = [wheel for wheel in wheels if not _has(wheel.name.split("-")[0])]
        if missing:
            words = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", self.out / "site"]
            code = self._run("kit", ["-m", "pip", "install", *map(str, words), *map(str, missing)], limit_s=60.0)
            if code is None:
                return "too slow", f"pip did not end: {self._tail('kit')}", {}
            if code:
                return "failed", f"pip ended with code {code}: {self._tail('kit')}", {}
        code = self._run("kit", ["-c", "import zmq, msgspec, parsl, cloudpickle, psutil, click, rich"], limit_s=30.0)
        if code is None:
            return "too slow", f"the imports did not end: {self._tail('kit')}", {}
        if code:
            return "failed", f"{self._tail('kit')}; take wheels along: make gpu-kit", {}
        return "ok", f"{len(missing)} of {len(wheels)} wheels installed", {}

    def _side(self, name: str, limit_s: float) -> tuple[str, str, dict[str, Any]]:
        """A part of parts.py."""
        began, answer = time.monotonic(), self.work / f"{name}.json"
        answer.unlink(missing_ok=True)
        words = ["-m", "benchmarks.gpu.parts", name, str(answer), "--work", str(self.work)]
        code = self._run(name, [*words, "--size", str(int(self.asked.size))], limit_s=limit_s)
        said: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        numbers, skipped = said.get("numbers", {}), said.get("skipped", "")
        if skipped:
            return "skipped", skipped, numbers
        if code is None:
            limit_s = min(limit_s, max(1.0, self.ends_at - began))
            return "too slow", f"it did not end within {limit_s:.0f} s: {self._tail(name)}", numbers
        return ("failed", f"exit code {code}: {self._tail(name)}", numbers) if code else ("ok", "", numbers)

    def _tests(self, name: str, limit_s: float) -> tuple[str, str, dict[str, Any]]:
        """Every test file that has a test with the marker `gpu`."""
        marked = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "@pytest.mark.gpu" in path.read_text()]
        words = ["-m", "pytest", "-m", "gpu", "-q", "-o", f"cache_dir={self.work / 'pytest'}", "--timeout", "100"]
        words += map(str, marked)
        # Over a stand-in they would prove nothing: rehearsed, they are collected and skip themselves.
        plain = {name: value for name, value in self.environ.items() if name != "STANDIN_NVML"}
        places = self.environ["PYTHONPATH"].split(os.pathsep)
        plain["PYTHONPATH"] = os.pathsep.join(place for place in places if not place.endswith("tests/driver"))
        code = self._run(name, words, limit_s=limit_s, environ=plain)
        text = (self.out / "logs" / f"{name}.log").read_text(errors="replace")
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)", text.splitlines()[-1] if text else "")
        numbers = {what: int(count) for count, what in found}
        if code is None:
            return "too slow", f"they did not end within {limit_s:.0f} s", numbers
        if code:
            return "failed", self._tail(name), numbers
        if not numbers.get("passed"):
            return "skipped", "every test was skipped: " + self._tail(name), numbers
        return "ok", "", numbers

    def _run(self, name: str, words: list[str], *, limit_s: float, environ: dict[str, str] | None = None) -> int | None:
        """Run Python; its exit code, or None when it took too long. What it started ends with it."""
        left_s = max(1.0, min(limit_s, self.ends_at - time.monotonic()))
        with (self.out / "logs" / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=environ or self.environ, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                return process.wait(left_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    pass
                return None
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()

    def _tail(self, name: str) -> str:
        lines = (self.out / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it said nothing"


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _devices() -> str:
    """The GPUs, by NVIDIA's own tool."""
    try:
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return "no GPU"
    names = [name.strip() for name in said if name.strip()]
    return ", ".join(
        f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)
    )


def _commit() -> str:
    said = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
