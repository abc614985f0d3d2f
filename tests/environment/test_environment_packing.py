from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import msgspec
import pytest
from environment.small import ROOT, SmallEnvironment

from stoker.manager.environment.carrying import FILE_TIME_S, PackedEnvironment, write_archive
from stoker.manager.environment.members import ArchiveMember
from stoker.pilot.starter.place import StartError, make_virtual_environment, unpack

PACK = (
    "import msgspec, sys; from stoker.manager.environment.carrying import pack_environment\n"
    "print(msgspec.json.encode(pack_environment(python=''.join(sys.argv[1:]))).decode())"
)
KEY = "from stoker.manager.environment.members import inspect_environment; print(inspect_environment().key)"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def pack(small: SmallEnvironment, *arguments: str) -> PackedEnvironment:
    return msgspec.json.decode(small.run(PACK, *arguments), type=PackedEnvironment)


@pytest.fixture
def other(small: SmallEnvironment, tmp_path: Path) -> SmallEnvironment:
    made = object.__new__(SmallEnvironment)
    made.path, made.home = tmp_path / "venv", tmp_path / "home"
    shutil.copytree(small.path, made.path, symlinks=True)
    return made


@pytest.mark.long
def test_packed_environment_runs_from_another_folder(packed: PackedEnvironment, tmp_path: Path):
    folder = tmp_path / "a place"
    folder.mkdir()
    unpack(Path(packed.packages.source), folder)
    make_virtual_environment(folder, version=packed.python, named="", base=Path(packed.base))
    code = (
        "import sys, stoker, zmq, msgspec; print(sys.prefix, sys.base_prefix, stoker.__file__, zmq.__file__, sep='\\n')"
    )
    ran = subprocess.run(
        [str(folder / "bin" / "python"), "-P", "-c", code], capture_output=True, text=True, env={}, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    places = ran.stdout.split("\n")[:-1]
    assert places[:2] == [str(folder), str(folder / "base")]
    assert all(place.startswith(f"{folder}/lib/python") for place in places[2:])
    script = subprocess.run([str(folder / "bin" / "say-where")], capture_output=True, text=True, timeout=60)
    assert script.stdout.strip() == str(folder)


@pytest.fixture(scope="module")
def packed(small: SmallEnvironment) -> PackedEnvironment:
    return pack(small)


def test_packed_environment_contains_the_required_files(packed: PackedEnvironment):
    with tarfile.open(packed.packages.source) as tar:
        names = {member.name: member for member in tar}
        inside = f"lib/python{VERSION}/site-packages/"
        compiled = tar.extractfile(next(name for name in names if name.startswith(f"{inside}msgspec/__pycache__/")))
        assert int.from_bytes(compiled.read()[8:12], "little") == FILE_TIME_S, (
            "bytecode has the time of its packed source"
        )
    assert f"{inside}stoker/pilot/agent/agent.py" in names
    assert f"{inside}stoker/pilot/starter/start.sh" in names
    assert not [name for name in names if "/.git" in name or name.startswith(("base/", "bin/python", "bin/activate"))]
    assert {member.mtime for member in names.values()} == {FILE_TIME_S}
    assert {member.uid for member in names.values()} == {0}
    with tarfile.open(packed.base) as tar:
        base = set(tar.getnames())
    assert f"base/bin/python{VERSION}" in base
    assert f"base/lib/python{VERSION}/os.py" in base
    assert not [name for name in base if "site-packages" in name or f"python{VERSION}/test/" in name]


def test_equal_environments_are_packed_once_into_one_archive(
    small: SmallEnvironment, other: SmallEnvironment, packed: PackedEnvironment
):
    inode = Path(packed.packages.source).stat().st_ino
    named = pack(small, "python3.11")
    assert (named.base, named.interpreter) == ("", "python3.11"), "a configured interpreter is not packed"
    assert named.packages == packed.packages
    assert Path(named.packages.source).stat().st_ino == inode
    assert pack(other, "python3").packages.name == packed.packages.name


def test_changed_packages_make_another_environment(other: SmallEnvironment, tmp_path: Path):
    source = tmp_path / "project"
    source.mkdir()
    (source / "mine.py").write_text("x = 1\n")
    (other.packages / "mine.pth").write_text(f"{source}\n")
    [record] = other.packages.glob("msgspec-*.dist-info/RECORD")
    keys = [other.run(KEY)]
    assert other.run(KEY) == keys[0]
    for change in (
        lambda: other.bring("packaging"),
        lambda: record.write_text(record.read_text() + "msgspec/more.py,sha256=x,1\n"),
        lambda: (source / "mine.py").write_text("x = 12\n"),
        lambda: (other.packages / "by_hand.py").write_text(""),
    ):
        change()
        keys.append(other.run(KEY))
    assert len(set(keys)) == 5


def test_editable_installs_are_packed_and_stale_bytecode_is_not(other: SmallEnvironment, tmp_path: Path):
    other.run("import compileall, psutil; compileall.compile_dir(psutil.__path__[0], quiet=1)")
    changed = other.packages / "psutil" / "_pswindows.py"  # no test imports this file, so no test recompiles it
    changed.write_text(changed.read_text() + "# changed\n")
    for name in ("by_line", "by_hook"):
        package = tmp_path / name / "src" / name
        (package / "inner").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "inner" / "data.txt").write_text(name)
    (other.packages / "by_line.pth").write_text(f"{tmp_path / 'by_line' / 'src'}\n")
    (other.packages / "__editable___by_hook_finder.py").write_text(
        f"import sys\nMAPPING = {{'by_hook': {str(tmp_path / 'by_hook' / 'src' / 'by_hook')!r}}}\n"
        "class Finder:\n    @classmethod\n    def find_spec(cls, name, path=None, target=None): return None\n"
        "def install(): sys.meta_path.append(Finder)\n"
    )
    (other.packages / "by_hook.pth").write_text(
        "import __editable___by_hook_finder; __editable___by_hook_finder.install()\n"
    )
    with tarfile.open(pack(other, "python3").packages.source) as tar:
        inside = f"lib/python{VERSION}/site-packages/"
        for name in ("by_line", "by_hook"):
            file = tar.extractfile(f"{inside}{name}/inner/data.txt")
            assert file.read() == name.encode()
        assert not [name for name in tar.getnames() if "__editable__" in name]
        compiled = [name.rpartition("/")[2] for name in tar.getnames() if "/psutil/__pycache__/" in name]
    assert not [name for name in compiled if name.startswith("_pswindows.")]
    assert [name for name in compiled if name.startswith("_psosx.")]


@pytest.mark.long
def test_files_that_pip_installed_elsewhere_are_packed(other: SmallEnvironment, tmp_path: Path):
    for folder, text in ((tmp_path / "elsewhere", "first"), (other.packages, "second")):
        (folder / "boxed").mkdir(parents=True)
        (folder / "boxed" / "__init__.py").write_text(text)
        (folder / f"boxed-1.{text}.dist-info").mkdir()
        (folder / f"boxed-1.{text}.dist-info" / "RECORD").write_text("boxed/__init__.py,,\n")
    (other.packages / "boxed" / "of_second.py").write_text("")
    (tmp_path / "elsewhere" / "own.py").write_text("")
    said = other.run(f"import sys; sys.path.insert(0, {str(tmp_path / 'elsewhere')!r})\n{PACK}", "python3")
    with tarfile.open(msgspec.json.decode(said, type=PackedEnvironment).packages.source) as tar:
        inside = f"lib/python{VERSION}/site-packages/"
        file = tar.extractfile(f"{inside}boxed/__init__.py")
        assert file.read() == b"first"
        assert not {f"{inside}own.py", f"{inside}boxed/of_second.py"} & set(tar.getnames())


def test_unknown_kind_of_editable_install_is_refused(other: SmallEnvironment):
    info = other.packages / "odd-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (info / "direct_url.json").write_text('{"url": "file:///somewhere/odd", "dir_info": {"editable": true}}')
    said = other.run(
        "from stoker.errors import ConfigError; from stoker.manager.environment.carrying import pack_environment\n"
        "try: pack_environment()\nexcept ConfigError as error: print(error)"
    )
    assert "odd is an editable install of /somewhere/odd" in said
    assert "pip install /somewhere/odd" in said


def test_packing_reports_progress_and_tar_can_list_the_archive(tmp_path: Path):
    """The archive has several compressed streams."""
    size, file, archive = 3 << 20, tmp_path / "file", tmp_path / "a.tar.gz"
    file.write_bytes(bytes(size))
    told: list[tuple[int, int]] = []
    members = [ArchiveMember(f"f{number}", str(file), size) for number in range(3)]
    write_archive(archive, members, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(size, 3 * size), (2 * size, 3 * size), (3 * size, 3 * size)]
    listed = subprocess.run(["tar", "-tzf", archive], capture_output=True, text=True, check=True).stdout
    assert listed.split() == ["f0", "f1", "f2"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("echo 3.2", "is Python 3.2, and the environment is for Python"),
        ("echo 'no such library' >&2; exit 1", r"does not run \(no such library\)"),
    ],
)
def test_unsuitable_interpreter_is_reported(tmp_path: Path, said: str, expected: str):
    named = tmp_path / "python-of-the-node"
    named.write_text(f"#!/bin/sh\n{said}\n")
    named.chmod(0o755)
    with pytest.raises(StartError, match=expected):
        make_virtual_environment(tmp_path, version=VERSION, named=str(named), base=tmp_path / "none")


def test_starter_runs_without_installed_packages(small: SmallEnvironment, tmp_path: Path):
    """`start.pyz` contains all its imports: run it without the project and without packages."""
    from stoker.manager.environment.carrying import pilot_starter_command, write_pilot_files
    from stoker.protocol.session import SessionFolder
    from stoker.site import Environment, EnvironmentKind, Provider, ProviderKind, Site

    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    site = Site(
        name="here",
        provider=Provider(kind=ProviderKind.SLURM),
        environment=Environment(kind=EnvironmentKind.PACKED, python="python-of-nobody"),
    )
    place = write_pilot_files(folder, site, pack(small, "python-of-nobody"))
    assert not (place / "base.tar.gz").exists()
    assert not (place / "keys").exists()
    command = pilot_starter_command(folder, site, ["--scratch", str(tmp_path)])
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "has no python-of-nobody, and the environment is for Python" in ran.stderr
    assert str(ROOT) not in ran.stderr


@pytest.mark.long
@pytest.mark.skipif(
    "posix_local" in sysconfig.get_scheme_names(),
    reason="this Python is Debian's: it looks for packages in dist-packages, which no conda environment has",
)
def test_conda_environment_includes_its_libraries(small: SmallEnvironment, packed: PackedEnvironment, tmp_path: Path):
    prefix = tmp_path / "conda"
    unpack(Path(packed.base), tmp_path)
    (tmp_path / "base").rename(prefix)
    packages = prefix / "lib" / f"python{VERSION}" / "site-packages"
    shutil.copytree(small.packages, packages)
    for name in ("conda-meta/blas-1.0-h1.json", "lib/libblas.so.3", "lib/libblas.a", "share/proj/proj.db", "bin/tool"):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(name)
    (prefix / "lib" / "libblas.so").symlink_to("libblas.so.3")
    (prefix / "bin" / "python").symlink_to(f"python{VERSION}")
    conda = object.__new__(SmallEnvironment)
    conda.path, conda.home = prefix, tmp_path / "home"
    packed = pack(conda, "python3")
    with tarfile.open(packed.packages.source) as tar:
        names = set(tar.getnames())
        assert tar.getmember("lib/libblas.so").linkname == "libblas.so.3"
    assert {"lib/libblas.so.3", "share/proj/proj.db", "bin/tool"} <= names
    assert f"lib/python{VERSION}/site-packages/zmq/__init__.py" in names
    assert not {"lib/libblas.a", f"lib/python{VERSION}/os.py", f"bin/python{VERSION}"} & names
    key = conda.run(KEY)
    (prefix / "conda-meta" / "blas-1.0-h1.json").rename(prefix / "conda-meta" / "blas-1.0-h2.json")
    assert conda.run(KEY) != key
