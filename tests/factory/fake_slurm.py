"""A fake Slurm that tests control: commands on PATH, jobs in a folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct")


class FakeSlurm:
    """Put `bin` first on PATH and `folder` into FAKE_SLURM (`environ`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        program = Path(__file__).with_name("fake_slurm_command.py").read_text()
        for name in COMMANDS:
            (self.bin / name).write_text(f"#!{sys.executable} -ES\n{program}")
            (self.bin / name).chmod(0o755)

    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{os.environ['PATH']}", "FAKE_SLURM": str(self.folder)}

    def fault(self, command: str, **how: Any) -> None:
        """Set the fault of a command; without `how`, remove the fault."""
        file = self.folder / f"{command}.fault"
        if not how:
            file.unlink(missing_ok=True)
            return
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(how))
        draft.replace(file)

    def controller(self, *, up: bool) -> None:
        away = "Unable to contact slurm controller (connect failure)"
        said = {
            "sbatch": f"sbatch: error: Batch job submission failed: {away}",
            "squeue": f"slurm_load_jobs error: {away}",
            "scancel": f"scancel: error: {away}",
            "scontrol": f"slurm_load_jobs error: {away}",
        }
        for command, words in said.items():
            self.fault(command, **({} if up else {"code": 1, "err": words}))

    def run_jobs(self) -> None:
        """Run submitted jobs at once as local processes."""
        (self.folder / "runs").touch()

    def jobs(self) -> dict[str, dict[str, Any]]:
        files = sorted(self.folder.glob("job-*.json"))
        return {job["id"]: job for job in (json.loads(file.read_text()) for file in files)}

    def put(self, job: str, **facts: Any) -> None:
        file = self.folder / f"job-{job}.json"
        before = json.loads(file.read_text()) if file.exists() else {"id": job, "state": "PENDING"}
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps({**before, **facts}))
        draft.replace(file)

    def asked(self, command: str) -> list[list[str]]:
        file = self.folder / "commands.log"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [arguments for _, name, arguments in lines if name == command]

    def hanging(self) -> list[int]:
        groups = [int(file.read_text()) for file in self.folder.glob("hangs-*")]
        return [group for group in groups if _is_alive(group)]

    def close(self) -> None:
        for group in self.hanging():  # a killed factory does not stop its commands
            os.killpg(group, signal.SIGKILL)
        for job in self.jobs().values():
            if job.get("pid"):
                with suppress(ProcessLookupError):
                    os.killpg(job["pid"], signal.SIGKILL)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
