from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers import common
from benchmarks.papers.arlo import __main__ as arlo
from benchmarks.papers.arlo import tables as arlo_tables
from benchmarks.papers.arlo.measured import records as arlo_records
from benchmarks.papers.common import exit_status
from benchmarks.papers.pervasive import __main__ as pervasive
from benchmarks.papers.prompt_tuner import __main__ as prompt_tuner
from benchmarks.papers.schedmate.scheduling import __main__ as schedmate
from benchmarks.papers.schedmate.scheduling.simulate import records as schedmate_records
from benchmarks.papers.slinfer import __main__ as slinfer
from benchmarks.papers.slinfer import tables
from benchmarks.papers.slinfer.cases import Result, records
from benchmarks.papers.slinfer.measures import Measures
from stoker.errors import StokerError


def fails() -> int:
    raise StokerError("the trace is damaged")


def stops() -> int:
    raise KeyboardInterrupt


def test_each_program_outcome_has_its_exit_status_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: 0, stopped="") == 0
    assert capsys.readouterr().err == ""
    assert exit_status(fails, stopped="") == 1
    assert capsys.readouterr().err == "the trace is damaged\n"
    assert exit_status(stops, stopped="the same command continues kept.json") == 130
    assert "continues kept.json" in capsys.readouterr().err


@pytest.mark.parametrize("paper", [arlo, schedmate, slinfer], ids=lambda paper: paper.__name__.split(".")[2])
def test_reproduction_without_its_data_is_skipped_or_refused(
    paper: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(paper, "missing", lambda: "no trace")
    assert paper.main(["--skip", "--out", str(tmp_path)]) == 0
    assert paper.main(["--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "no trace: the evaluation is skipped\n" * 2


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (pervasive.main, ["--quick", "--keep-fits", "--out", "{}"], "exclude each other"),
        (pervasive.main, ["--keep-fits", "--out", "{}"], "cannot be read"),
        (prompt_tuner.main, ["--runs", "{}/file"], "not a folder"),
        *(
            (main, arguments, said)
            for main in (pervasive.main, prompt_tuner.main)
            for arguments, said in (
                (["--jobs", "many"], "a number from 1 to"),
                (["--quick"], "--quick needs --out"),
                (["--out", "{}/file"], "not a folder"),
            )
        ),
    ],
)
def test_invalid_command_line_options_are_reported(
    main: Callable[[list[str]], int], arguments: list[str], said: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main([word.replace("{}", str(tmp_path)) for word in arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("read", [arlo_records, schedmate_records, records])
def test_file_without_results_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    for content in ('[{"of": "something else"}]', '{"runs": [1]}'):
        (tmp_path / "kept.json").write_text(content)
        with pytest.raises(ValueError, match="holds no results"):
            read(tmp_path / "kept.json")


@pytest.mark.parametrize("every", [arlo_tables.TABLES, tables.TABLES])
def test_cases_of_every_table_have_distinct_names(every: dict[str, Callable[[], list[Any]]]) -> None:
    if every is arlo_tables.TABLES and arlo.missing():
        pytest.skip(arlo.missing())
    for name, cases in every.items():
        names = [case.name for case in cases()]
        assert len(names) == len(set(names)), name


def test_each_release_runs_a_case_once_and_unknown_cases_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases, ran = [tables.Case("a", 1), tables.Case("b", 2), tables.Case("a", 1)], list[str]()
    path = tmp_path / "kept.json"

    def run(case: tables.Case) -> Result:
        ran.append(case.system)
        measures = Measures(1, 0.0, 0.0, 0.0, 0.0, (), {}, 0)
        return Result(case, common.RELEASE, measures, {}, took_s=0.0, engine_steps=0)

    for _ in range(2):
        records(path).bring(cases, run)
        assert ran == ["a", "b"]
    monkeypatch.setattr(common, "RELEASE", "another")
    records(path).bring(cases[:1], run)
    assert ran == ["a", "b", "a"]
    records(path).drop_others(cases[1:2])
    assert list(records(path).found) == [cases[1].name]
