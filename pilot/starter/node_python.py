"""Making an environment of what was unpacked: a virtual environment over an interpreter that runs on this node.

A virtual environment is a file that says where the interpreter lies, and a link to it. Neither needs the `venv` module,
which some systems leave out, and both are written here, where the places are known. So nothing must be set for
programs that are started from it: they find their packages by `sys.executable` alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from stoker.pilot.starter.place import StartError, unpack

_TRY = "import ctypes, hashlib, ssl, sqlite3, zlib, sys; print('%d.%d' % sys.version_info[:2])"
_LIMIT_S = 60.0
_MARK = "needs-bundled"


def finish(folder: Path, *, version: str, named: str, base: Path) -> None:
    """Make `folder` an environment for Python `version`: of the interpreter that the node calls `named`, or of the one
    in the archive `base`. Raises StartError when it does not run here, or is another version, and OSError."""
    if named:
        interpreter = _on_this_node(named, version)
    else:
        unpack(base, folder, missing_only=True)  # one that was killed meanwhile, or a cleaner, has left half of it
        interpreter = folder / "base" / "bin" / f"python{version}"
        _check_base(folder, interpreter)
    (folder / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    (folder / "bin").mkdir(exist_ok=True)
    for name, target in (("bin/python", interpreter), ("bin/python3", "python"), ("lib64", "lib")):
        if not os.path.lexists(folder / name):
            (folder / name).symlink_to(target)


def environ_for(folder: Path, *, begun: str = "") -> dict[str, str]:
    """This process's environment variables, as a program of the environment in `folder` should have them. `begun` is a
    folder that will be gone."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    environ["VIRTUAL_ENV"] = str(folder)
    environ["PATH"] = os.pathsep.join([str(folder / "bin"), environ.get("PATH") or "/usr/local/bin:/usr/bin:/bin"])
    places = [place for place in environ.pop("LD_LIBRARY_PATH", "").split(os.pathsep) if place]
    places = [place for place in places if not begun or not place.startswith(begun)]
    if (folder / "base" / _MARK).exists():
        places.insert(0, str(folder / "base" / "lib" / "bundled"))
    return environ | ({"LD_LIBRARY_PATH": os.pathsep.join(places)} if places else {})


def _on_this_node(named: str, version: str) -> Path:
    here = os.uname().nodename
    do = "set [environment] python to one that is, or leave it empty, and the interpreter travels too"
    found = shutil.which(os.path.expandvars(named))
    if found is None:
        raise StartError(f"{here} has no {named}, and the environment is for Python {version}; {do}")
    said, wrong = _run(Path(found))
    if said != version:
        what = f"is Python {said}" if said else f"does not run ({wrong})"
        raise StartError(f"{found} on {here} {what}, and the environment is for Python {version}; {do}")
    return Path(found).resolve()


def _check_base(folder: Path, interpreter: Path) -> None:
    """See that the interpreter runs here with this node's shared libraries; else with those that it brought."""
    said, wrong = _run(interpreter)
    if said:
        return
    said, wrong_again = _run(interpreter, libraries=folder / "base" / "lib" / "bundled")
    if not said:
        raise StartError(
            f"the interpreter that came along does not run on {os.uname().nodename}: {wrong_again or wrong}; its"
            " system is too different from this one: set [environment] python to an interpreter that is there"
        )
    (folder / "base" / _MARK).touch()


def _run(interpreter: Path, *, libraries: Path | None = None) -> tuple[str, str]:
    """The interpreter's version; or nothing, and the last line of what it said."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_LIBRARY_PATH"))}
    if libraries is not None:
        environ["LD_LIBRARY_PATH"] = str(libraries)
    command = [str(interpreter), "-I", "-c", _TRY]
    try:
        ran = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=environ, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if ran.returncode == 0:
        return ran.stdout.decode().strip(), ""
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return "", lines[-1] if lines else f"exit code {ran.returncode}"
