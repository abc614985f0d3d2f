"""Environments on a node. A user's pilots share each unpacked environment.

    <scratch>/stoker-<uid>/environments/
        NAME/                 a complete environment, renamed from a draft
        NAME.files            the number of files in NAME; with fewer files, a pilot unpacks the archive again
        NAME.used             locked (shared) by the pilots that run in NAME; the mtime is the time of last use
        NAME.making           locked by the pilot that fetches and unpacks NAME
        NAME.tar.gz           the archive, until a pilot moves it into its object cache

The code creates virtual environments itself, because some systems lack the `venv` module.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import os
import shutil
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

# ---- environments

Getter = Callable[[Path], object]  # a function that writes the archive to a path
MAX_ENVIRONMENT_BYTES = 20_000_000_000  # maximum size of all environments together
MAX_UNUSED_S = 14 * 86400.0  # default seconds after which an unused environment is removed
_MOST_NAMES = 5  # number of folder names to try, because other users may own some of these folders
OTHER_SCRATCH_ADVICE = "set [pilot] scratch (--scratch) or STOKER_SCRATCH to another folder"


class StartError(Exception):
    """The pilot cannot start on this node."""


def scratch_path(configured: str) -> Path:
    parent = os.path.expandvars(configured)
    if parent.startswith("$"):
        raise StartError(f"[pilot] scratch is {parent}, a variable that is not set on this node; name a folder")
    for name in ("STOKER_SCRATCH", "SLURM_TMPDIR", "TMPDIR"):
        parent = parent or os.environ.get(name, "")
    return Path(parent or "/tmp").absolute() / f"stoker-{os.getuid()}"


def base_folder(configured: str) -> Path:
    """Return this user's scratch folder on this node. If another user owns the folder, try the suffixes -2 to -5."""
    first, why = scratch_path(configured), "it belongs to another user"
    try:
        for folder in (first, *(first.with_name(f"{first.name}-{number}") for number in range(2, _MOST_NAMES + 1))):
            with suppress(FileExistsError):  # a file with this name exists; try the next name
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink():
                folder.chmod(0o700)
                return folder
    except OSError as error:
        why = str(error)
    raise StartError(f"no scratch folder could be created at {first}: {why}; {OTHER_SCRATCH_ADVICE}")


class Environments:
    def __init__(
        self, base: Path, *, max_bytes: int = MAX_ENVIRONMENT_BYTES, max_unused_s: float | None = None
    ) -> None:
        self._root = base / "environments"
        self._max_bytes = max_bytes
        self._max_unused_s = MAX_UNUSED_S if max_unused_s is None else max_unused_s
        self._root.mkdir(mode=0o700, exist_ok=True)

    def archive_path(self, name: str) -> Path:
        return self._root / f"{name}.tar.gz"

    def prepare_and_lock(
        self, name: str, *, needed_bytes: int, get_archive: Getter, make_usable: Callable[[Path], None]
    ) -> Path:
        """Return the locked folder of an environment; create the folder if necessary. Raises StartError."""
        used = self._open_lock_file(f"{name}.used")
        _lock_if_supported(used, fcntl.LOCK_SH)
        os.set_inheritable(used, True)
        os.utime(used)
        making = self._open_lock_file(f"{name}.making")
        folder = self._root / name
        try:
            self.remove_unused()
            _lock_if_supported(making, fcntl.LOCK_EX)
            if not self._is_complete(folder):
                self._create_or_repair(folder, needed_bytes, get_archive, make_usable)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StartError(self._describe_missing_space(needed_bytes)) from error
            raise StartError(f"the environment could not be unpacked in {self._root}: {error}") from error
        finally:
            os.close(making)
        return folder

    def remove_unused(self) -> None:
        for place in self._folders_by_last_use():
            with suppress(OSError):
                if time.time() - place.with_name(f"{place.name}.used").stat().st_mtime >= self._max_unused_s:
                    self._remove_if_unused(place)

    def _open_lock_file(self, file: str) -> int:
        return os.open(self._root / file, os.O_RDWR | os.O_CREAT, 0o600)

    def _create_or_repair(
        self, folder: Path, needed_bytes: int, get_archive: Getter, make_usable: Callable[[Path], None]
    ) -> None:
        self._free_disk_space(folder, needed_bytes)
        files = folder.with_name(f"{folder.name}.files")
        files.unlink(missing_ok=True)  # the environment counts as incomplete until `files` is written again
        archive = self.archive_path(folder.name)
        get_archive(archive)
        if folder.is_dir():  # files are missing, and other pilots may run here: keep the complete files
            unpack(archive, folder, missing_only=True)
        else:
            draft = folder.with_name(f"{folder.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(0o700)
            unpack(archive, draft)
            draft.rename(folder)
        make_usable(folder)
        files.write_text(str(_count_files(folder)))

    def _is_complete(self, folder: Path) -> bool:
        try:
            return _count_files(folder) >= int(folder.with_name(f"{folder.name}.files").read_text())
        except (OSError, ValueError):
            return False

    def _free_disk_space(self, wanted: Path, needed_bytes: int) -> None:
        here = [(place, _sum_file_bytes(place)) for place in self._folders_by_last_use() if place != wanted]
        total = needed_bytes + sum(size for _, size in here)
        for place, size in here:
            if total <= self._max_bytes and self._free_bytes() > needed_bytes:
                return
            if self._remove_if_unused(place):
                total -= size
        if self._free_bytes() <= needed_bytes:
            raise StartError(self._describe_missing_space(needed_bytes))

    def _folders_by_last_use(self) -> list[Path]:
        used = sorted(self._root.glob("*.used"), key=lambda file: file.stat().st_mtime)
        return [place for file in used if (place := file.with_suffix("")).is_dir()]

    def _remove_if_unused(self, place: Path) -> bool:
        lock = self._open_lock_file(f"{place.name}.used")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a pilot runs in this environment
            os.close(lock)
            return False
        gone = place.with_name(f"{place.name}.gone")
        try:
            for file in (place.with_name(f"{place.name}.files"), self.archive_path(place.name)):
                file.unlink(missing_ok=True)
            place.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        finally:
            os.close(lock)
        return True

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._root).free

    def _describe_missing_space(self, needed_bytes: int) -> str:
        return (
            f"the environment needs {needed_bytes / 1e9:.1f} GB in {self._root} on {os.uname().nodename}, and"
            f" {self._free_bytes() / 1e9:.1f} GB are free; set [pilot] scratch to a larger disk"
        )


def unpack(archive: Path, folder: Path, *, missing_only: bool = False) -> None:
    """Unpack an archive. With `missing_only`, do not replace complete files. Raises OSError, StartError."""
    trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            members = _allowed_members(tar, folder, missing_only=missing_only)
            tar.extractall(folder, members, **trusted)  # type: ignore[arg-type]
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError) as error:
        with suppress(OSError):
            archive.unlink()
        raise StartError(f"the archive {archive} is damaged: {error}; start again to get another archive") from error


def _allowed_members(tar: tarfile.TarFile, folder: Path, *, missing_only: bool) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if member.name.startswith("/") or ".." in member.name.split("/") or not (member.isfile() or member.issym()):
            raise ValueError(f"the member {member.name!r} is not allowed")
        if not missing_only or not _is_complete_file(folder / member.name, member):
            yield member


def _is_complete_file(place: Path, member: tarfile.TarInfo) -> bool:
    try:
        facts = place.lstat()
    except OSError:
        return False
    if member.issym() or facts.st_size >= member.size:
        return True
    place.unlink()  # remove instead of overwriting, because another process may have mapped the file
    return False


def link_or_copy(source: str | Path, target: Path) -> None:
    """Hard-link `source` to `target`, or copy it if a link is impossible. Raises OSError."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _count_files(folder: Path) -> int:
    return sum(len(files) for below, _, files in os.walk(folder) if os.path.basename(below) != "__pycache__")


def _sum_file_bytes(folder: Path) -> int:
    total = 0
    for below, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(below, file)).st_size
    return total


def _lock_if_supported(descriptor: int, how: int) -> None:
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


# ---- virtual environments

_INTERPRETER_TEST = "import ctypes, hashlib, ssl, sqlite3, zlib, sys; print('%d.%d' % sys.version_info[:2])"
_TEST_LIMIT_S = 60.0
_NEEDS_BUNDLED_MARK = "needs-bundled"


def make_virtual_environment(folder: Path, *, version: str, named: str, base: Path) -> None:
    """Make `folder` a virtual environment. Use the node's interpreter `named` or, if `named` is empty, the interpreter
    in the archive `base`.
    """
    if named:
        interpreter = _find_interpreter(named, version)
    else:
        unpack(base, folder, missing_only=True)  # a killed process or a cleanup job may have left only some files
        interpreter = folder / "base" / "bin" / f"python{version}"
        _check_base_interpreter(folder, interpreter)
    (folder / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    (folder / "bin").mkdir(exist_ok=True)
    for name, target in (("bin/python", interpreter), ("bin/python3", "python"), ("lib64", "lib")):
        if not os.path.lexists(folder / name):
            (folder / name).symlink_to(target)


def environment_variables(folder: Path, *, begun: str) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    environ["VIRTUAL_ENV"] = str(folder)
    environ["PATH"] = os.pathsep.join([str(folder / "bin"), environ.get("PATH") or "/usr/local/bin:/usr/bin:/bin"])
    places = environ.pop("LD_LIBRARY_PATH", "").split(os.pathsep)
    places = [place for place in places if place and not (begun and place.startswith(begun))]
    if (folder / "base" / _NEEDS_BUNDLED_MARK).exists():
        places.insert(0, str(folder / "base" / "lib" / "bundled"))
    return environ | ({"LD_LIBRARY_PATH": os.pathsep.join(places)} if places else {})


def _find_interpreter(named: str, version: str) -> Path:
    here = os.uname().nodename
    do = "set [environment] python to a Python of that version, or leave it empty to send the interpreter too"
    found = shutil.which(os.path.expandvars(named))
    if found is None:
        raise StartError(f"{here} has no {named}, and the environment is for Python {version}; {do}")
    said, wrong = _run_interpreter_test(Path(found))
    if said != version:
        what = f"is Python {said}" if said else f"does not run ({wrong})"
        raise StartError(f"{found} on {here} {what}, and the environment is for Python {version}; {do}")
    return Path(found).resolve()


def _check_base_interpreter(folder: Path, interpreter: Path) -> None:
    said, wrong = _run_interpreter_test(interpreter)
    if said:
        return
    said, wrong_again = _run_interpreter_test(interpreter, libraries=folder / "base" / "lib" / "bundled")
    if not said:
        raise StartError(
            f"the interpreter of the archive does not run on {os.uname().nodename}: {wrong_again or wrong}; the"
            " archive's system is too different from this node's: set [environment] python to an interpreter on the"
            " node"
        )
    (folder / "base" / _NEEDS_BUNDLED_MARK).touch()


def _run_interpreter_test(interpreter: Path, *, libraries: Path | None = None) -> tuple[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LD_LIBRARY_PATH"))}
    if libraries is not None:
        environ["LD_LIBRARY_PATH"] = str(libraries)
    command = [str(interpreter), "-I", "-c", _INTERPRETER_TEST]
    try:
        ran = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=environ, timeout=_TEST_LIMIT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if ran.returncode == 0:
        return ran.stdout.decode().strip(), ""
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return "", lines[-1] if lines else f"exit code {ran.returncode}"
