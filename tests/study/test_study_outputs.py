"""What is written of runs: event logs and plots."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from study.small_runs import small_run

from stoker.errors import ConfigError, StokerError
from stoker.manager.sim.log import EventLog
from stoker.manager.study.log_files import read_log, write_log
from stoker.manager.study.measures import Steps, measure
from stoker.manager.study.plots import SHARES, Curves, curves_of, thinned, write_plots
from stoker.whole_files import draft_of

FACTS = {"scenario": "small", "policy": "default", "seed": 7, "complete": True}


def digest_of_file(folder: Path) -> str:
    """What is in the file of a run that this process simulates."""
    path = folder / "log.parquet"
    write_log(path, small_run(item_cv=0.5), FACTS)
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the log as a file


def test_a_log_comes_back_as_it_was_written(tmp_path: Path) -> None:
    log, path = small_run(), tmp_path / "log.parquet"
    write_log(path, log, FACTS)
    back, facts = read_log(path)
    assert (back.digest(), len(back), facts) == (log.digest(), len(log), FACTS)
    write_log(path, EventLog(), {})
    assert (len(read_log(path)[0]), read_log(path)[1]) == (0, {})
    assert [file.name for file in tmp_path.iterdir()] == ["log.parquet"]


def test_any_reader_of_parquet_understands_it(tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", small_run(), FACTS)
    table = pq.read_table(tmp_path / "log.parquet")
    assert table.column_names == ["at_s", "what", "call", "library", "pilot", "block", "value"]
    rows = table.to_pylist()
    assert sum(row["value"] for row in rows if row["what"] == "call_ended") == 100
    assert {row["call"] for row in rows if row["what"] == "pilot_came"} == {-1}


def test_the_same_run_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    program = "import pathlib, study.test_study_outputs as t; print(t.digest_of_file(pathlib.Path()))"
    (tmp_path / "theirs").mkdir()
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "theirs",
        capture_output=True, text=True, check=True, timeout=120,
        env=os.environ | {"PYTHONHASHSEED": "11", "PYTHONPATH": str(Path(__file__).parents[1])},
    ).stdout  # fmt: skip
    assert said.strip() == digest_of_file(tmp_path)


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"away\.parquet: no such file"):
        read_log(tmp_path / "away.parquet")
    (tmp_path / "text.parquet").write_text("no log")
    with pytest.raises(ConfigError, match=r"text\.parquet: not an event log"):
        read_log(tmp_path / "text.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"other\.parquet: not an event log of a simulation"):
        read_log(tmp_path / "other.parquet")


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("before")

    def stopped() -> None:
        with draft_of(path) as draft:
            draft.write_text("half")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stopped()
    assert (path.read_text(), [file.name for file in tmp_path.iterdir()]) == ("before", ["kept.json"])


# ---- plots


def test_curves_are_thinned_to_what_a_picture_shows() -> None:
    long = Steps((float(number), float(number * number)) for number in range(50_000))
    thin = thinned(long, points=500)
    assert len(thin.at_s) == 500
    assert (thin.at_s[0], thin.at_s[-1], thin.values[-1]) == (0.0, 49_999.0, 49_999.0**2)
    assert all(thin.values[place] == long.value(thin.at_s[place]) for place in range(500))
    short = Steps([(0.0, 1.0)])
    assert thinned(short) is short


def test_curves_keep_the_quantiles_of_times() -> None:
    curves: Curves = pickle.loads(pickle.dumps(curves_of(measure(small_run()))))  # they come from other processes
    assert curves.completed.values[-1] == 100.0
    assert len(curves.waits_s) == len(SHARES)
    assert all(before <= after for before, after in pairwise(curves.turnarounds_s))
    assert curves.waits_s[0] == pytest.approx(10.0)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Curves]]:
    """Two policies, as it were, under three seeds each."""
    slow = [curves_of(measure(small_run(seed=seed, item_cv=0.8, load_s=30.0))) for seed in range(3)]
    return {"default": [curves_of(measure(small_run(seed=seed, item_cv=0.8))) for seed in range(3)], "slow": slow}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory, runs: dict[str, list[Curves]]) -> list[Path]:
    pytest.importorskip("matplotlib", reason="plots need the extra `study`")
    return write_plots(tmp_path_factory.mktemp("plots"), runs, title="A pool that shrinks")


def test_plots_are_drawn_as_png_and_svg(drawn: list[Path]) -> None:
    from matplotlib.image import imread

    names = {f"{name}.{kind}" for name in ("completed", "devices", "queue", "times") for kind in ("png", "svg")}
    assert {path.name for path in drawn} == names == {path.name for path in drawn[0].parent.iterdir()}
    for path in drawn:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
            continue
        pixels = imread(path)[:, :, :3]
        for line in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # blue is the first policy, red the second
            near = abs(pixels - [part / 255 for part in line]).max(axis=2) < 0.02
            assert near.sum() > 100, path.name


def test_the_same_runs_give_the_same_plots_whatever_the_user_has_set(
    tmp_path: Path, drawn: list[Path], runs: dict[str, list[Curves]]
) -> None:
    import matplotlib

    with matplotlib.rc_context({"lines.linewidth": 9.0, "font.size": 30.0}):
        again = write_plots(tmp_path, runs, title="A pool that shrinks")
        assert matplotlib.rcParams["lines.linewidth"] == 9.0
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in drawn]


def test_without_matplotlib_plots_say_what_to_install(
    tmp_path: Path, runs: dict[str, list[Curves]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StokerError, match=r"stoker\[study\]"):
        write_plots(tmp_path, runs, title="t")
    with pytest.raises(ValueError, match="no runs"):
        write_plots(tmp_path, {"default": []}, title="t")
    assert list(tmp_path.iterdir()) == []
