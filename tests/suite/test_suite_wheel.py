from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("src", "apps", "contexts", "manager", "pilot", "site-configs", "tests/site")
OUTSIDE = ("reproduce", "benchmarks", "pervasive/", "infless", "elastic_flow", "scattered", "forgetful")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, there / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, there)
    command = [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('out')"]
    done = subprocess.run(command, cwd=there, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    [made] = (there / "out").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist()


def test_wheel_contains_the_product_and_no_paper_evaluation(names: list[str]) -> None:
    for name in ("policies/prompt_tuner/scheduling.py", "study/scenarios/awareness.toml"):
        assert f"stoker/manager/{name}" in names
    assert not [name for name in names if any(each in name for each in OUTSIDE)]


def test_files_of_the_wheel_are_no_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        assert not [each.filename for each in opened.infolist() if stat.S_ISLNK(each.external_attr >> 16)]
        assert opened.read("stoker/pilot/main.py") == (ROOT / "pilot" / "main.py").read_bytes()


FIRST_PROGRAM = """
import sys
import stoker

@stoker.app
def place_of_stoker(number):
    import stoker
    return number, stoker.__file__

if __name__ == "__main__":
    with stoker.load("here.toml"):
        print(*place_of_stoker(7).result())
"""


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bare = tmp_path_factory.mktemp("environment") / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    packages = packages_of(bare)
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(packages)
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "stoker" not in package.name and package.suffix != ".pth":
            (packages / package.name).symlink_to(package)
    return bare


def packages_of(bare: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", vars={"base": str(bare)}))


def run_bare(bare: Path, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "here.toml").write_text('name = "here"\n[pilot]\ndevices = "cpu:1"\n')
    command = [str(bare / "bin" / "python"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_wheel_runs_a_program_in_a_bare_environment(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FIRST_PROGRAM)
    ran = run_bare(bare, "program.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["7", str(packages_of(bare) / "stoker" / "__init__.py")]


def test_wheel_checks_a_site_from_a_bare_environment(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    command = ["-m", "stoker.manager.cli.entry", "doctor", "here.toml", "--tests", "-k", "starts or is_hot or modules"]
    ran = run_bare(bare, *command, folder=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("3 promises hold, none fails; in ")
