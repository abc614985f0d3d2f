"""What comes to the sandbox of a job before it runs, and what goes back after it."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from batch.condor.ads import Ad, value


class TransferError(Exception):
    """A file of the job cannot be had. `number` is the errno."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"reading from file {path}: (errno {error.errno}) {os.strerror(error.errno or 0)}")
        self.number = error.errno or 0


def send(job: Ad, sandbox: Path, *, machine: Ad) -> dict[str, Any]:
    """Fill the sandbox, and say how the job is to be run: command, folder, where its output goes."""
    home = Path(job["Iwd"])
    moved = _transferred(job, machine)
    program = _under(home, str(job["Cmd"]))
    if moved:
        if value(job, "TransferExecutable", True):
            program = _copy(program, sandbox / program.name)
            program.chmod(0o755)
        for name in value(job, "TransferInput", "").split(","):
            if name.strip():
                source = _under(home, name.strip())
                _copy(source, sandbox if name.strip().endswith("/") else sandbox / source.name)
    (sandbox / ".job.ad").write_text(job.printOld())
    (sandbox / ".machine.ad").write_text(machine.printOld())
    out, err = ("_condor_stdout", "_condor_stderr") if moved else (value(job, "Out"), value(job, "Err"))
    return {
        "command": [str(program), *_arguments(job)], "cwd": str(sandbox if moved else home), "transferred": moved,
        "stdin": "/dev/null", "out": str(_under(sandbox if moved else home, out)),
        "err": str(_under(sandbox if moved else home, err)),
    }  # fmt: skip


def bring_back(job: Ad, sandbox: Path, *, transferred: bool) -> None:
    """Output of a job that has ended by itself. Without TransferOutput every new file goes back, as in HTCondor."""
    if not transferred:
        return
    home = Path(job["Iwd"])
    for kept, name in (("_condor_stdout", value(job, "Out")), ("_condor_stderr", value(job, "Err"))):
        if name != "/dev/null":
            shutil.copyfile(sandbox / kept, _under(home, name))
    sent = {Path(name.strip()).name for name in value(job, "TransferInput", "").split(",")}
    sent |= {Path(job["Cmd"]).name, "_condor_stdout", "_condor_stderr", ".job.ad", ".machine.ad"}
    if "TransferOutput" in job:
        names = [name.strip() for name in value(job, "TransferOutput", "").split(",") if name.strip()]
    else:
        names = [path.name for path in sandbox.iterdir() if path.is_file() and path.name not in sent]
    for name in names:
        _copy(sandbox / name, home / Path(name).name)


def _transferred(job: Ad, machine: Ad) -> bool:
    should = value(job, "ShouldTransferFiles", "IF_NEEDED").upper()
    return should == "YES" or (should == "IF_NEEDED" and value(job, "FileSystemDomain") != machine["FileSystemDomain"])


def _under(home: Path, name: str) -> Path:
    return home / name


def _copy(source: Path, to: Path) -> Path:
    try:
        if source.is_dir():
            shutil.copytree(source, to, dirs_exist_ok=True)
        else:
            shutil.copy(source, to)
    except OSError as error:
        raise TransferError(source, error) from error
    return to


def _arguments(job: Ad) -> list[str]:
    if "Arguments" in job:
        return shlex.split(value(job, "Arguments", ""))
    return value(job, "Args", "").split()
