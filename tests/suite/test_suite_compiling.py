from __future__ import annotations

from pathlib import Path

import pytest
import suite_compiling
from _pytest.assertion import rewrite


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "conftest.py").touch()
    (tmp_path / "other.py").touch()
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text("def test_it():\n    assert 1 == 2\n")
    return sorted([tmp_path / "conftest.py", *tmp_path.glob("test_*.py")])


def compiled(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.rglob(f"*{rewrite.PYC_TAIL}"))


def test_shares_of_workers_cover_all_files_once(files, pytestconfig, monkeypatch):
    folder = files[0].parent
    monkeypatch.setattr(pytestconfig, "args", [str(folder)])
    suite_compiling.compile_share(pytestconfig, number=0, workers=2)
    assert compiled(folder) == ["conftest", "test_1", "test_3"]
    suite_compiling.compile_share(pytestconfig, number=1, workers=2)
    assert compiled(folder) == [file.stem for file in files]


def test_pytest_uses_files_compiled_by_a_worker(files, pytestconfig, monkeypatch):
    [file] = chosen = suite_compiling.files_of_tests([f"{files[1]}::test_it"])
    assert chosen == [files[1]]
    monkeypatch.setattr(pytestconfig, "args", [str(file)])
    suite_compiling.compile_share(pytestconfig, number=0, workers=1)
    [written] = file.parent.rglob(f"*{rewrite.PYC_TAIL}")
    assert rewrite._read_pyc(file, written) is not None
    file.write_text("def test_it():\n    assert 1 == 1\n")
    assert rewrite._read_pyc(file, written) is None, "the compiled file is out of date"
