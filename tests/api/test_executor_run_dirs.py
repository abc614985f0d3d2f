from __future__ import annotations

import os
from pathlib import Path

import parsl
import pytest
from parsl.config import Config
from parsl.dataflow.rundirs import make_rundir

from stoker.manager.executor import session


def test_parent_of_the_run_folders_may_appear_while_parsl_creates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looked = tmp_path / "runinfo", os.path.exists

    def look(path: object) -> bool:
        found = looked(path)  # type: ignore[arg-type]
        if path == str(folder):
            folder.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(os.path, "exists", look)
    monkeypatch.setattr(parsl, "load", lambda config: make_rundir(config.run_dir))
    assert session._load_parsl(Config(run_dir=str(folder))) == str(folder / "000")


def test_other_existing_file_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Config) -> None:
        raise FileExistsError(17, "File exists", "submit")

    monkeypatch.setattr(parsl, "load", load)
    with pytest.raises(FileExistsError):
        session._load_parsl(Config(run_dir=str(tmp_path)))
