"""Make virtual environments with only a pilot's packages, because packing PyTorch takes minutes."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("pyzmq", "msgspec", "cloudpickle", "psutil", "nvidia-ml-py")


class _Environment:
    def __init__(self, path: Path) -> None:
        self.path = path
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    @property
    def packages(self) -> Path:
        return self.path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


class SharedEnvironment(_Environment):
    """A virtual environment that imports the packages of the current environment without copying them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        (self.packages / "project.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")


class SmallEnvironment(_Environment):
    """A virtual environment at `path`. `home`: the state folder of the user."""

    def __init__(self, path: Path, home: Path) -> None:
        super().__init__(path)
        self.home = home
        for name in NEEDED:
            self.bring(name)
        (self.packages / "project.pth").write_text(f"{ROOT / 'src'}\n")
        self._compile()

    def bring_all(self, *names: str) -> None:
        for name in sorted(set[str]().union(*map(_with_requirements, names))):
            self.bring(name)

    def bring(self, name: str) -> None:
        for file in importlib.metadata.files(name) or ():
            source = Path(str(file.locate())).resolve()
            if ".." in file.parts or not source.is_file():
                continue
            target = self.packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def _compile(self) -> None:
        """Compile first: compiled files are packed, and other tests import Stoker's modules during packing."""
        links = (folder.resolve() for folder in (ROOT / "src" / "stoker").iterdir() if folder.is_symlink())
        places = map(str, (self.packages, ROOT / "src", *links))
        subprocess.run([self.python, "-m", "compileall", "-qq", *places], check=True, timeout=120)

    def script(self, name: str, text: str) -> None:
        file = self.path / "bin" / name
        file.write_text(f"#!{self.python}\n{text}")
        file.chmod(0o755)

    def run(self, code: str, *arguments: str) -> str:
        environ = {**os.environ, "STOKER_HOME": str(self.home)}
        environ.pop("PYTHONPATH", None)
        ran = subprocess.run(
            [self.python, "-P", "-c", code, *arguments], env=environ, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()


def _with_requirements(name: str, *, known: frozenset[str] = frozenset()) -> set[str]:
    found = {name}
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.name not in known and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found |= _with_requirements(requirement.name, known=known | found)
    return found
