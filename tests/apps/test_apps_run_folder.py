import concurrent.futures
import os
import threading

import pytest
from full_disk import full_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.datafile import write_rows
from stoker.errors import ConfigError, StokerError
from stoker.run_folder import PART, RecordLog, is_finished, open_run, read_options

KEY = ("id",)


def opened(root, *, parameters=None, **more):
    more = {"app": "toy", "prefix": "toy", "options": {"limit": 5}, **more}
    return open_run(root, parameters=parameters or {"limit": 5, "prompts": {"a": "1"}}, **more)


def test_unfinished_run_is_continued_but_a_finished_run_is_not(tmp_path):
    first = opened(tmp_path)
    assert not first.resumed
    with first.log(key=KEY) as log:
        log.append([{"id": "1"}])
    first.close()
    again = opened(tmp_path)
    assert again.resumed
    assert again.path == first.path
    with again.log(key=KEY) as log:
        assert len(log) == 1
    again.finish(name="results.jsonl", write=lambda path: path.write_text("done") and None)
    again.close()
    assert is_finished(first.path)
    assert not (first.path / PART).exists()
    third = opened(tmp_path)
    assert not third.resumed
    assert third.path != first.path
    third.close()


def test_changed_parameters_start_a_new_run_folder(tmp_path):
    first = opened(tmp_path)
    first.close()
    other = opened(tmp_path, parameters={"limit": 6, "prompts": {"a": "1"}})
    other.close()
    assert other.path != first.path
    fresh = opened(tmp_path, fresh=True)
    fresh.close()
    assert fresh.path not in (first.path, other.path)


def test_folder_of_other_parameters_is_refused_with_the_difference(tmp_path):
    opened(tmp_path, folder=tmp_path / "run").close()
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path, folder=tmp_path / "run", parameters={"limit": 9, "prompts": {"a": "2"}})
    assert "limit: 5 there, 9 now" in str(caught.value)
    assert "prompts: a 1 there, a 2 now" in str(caught.value)
    assert read_options(tmp_path / "run", app="toy") == {"limit": 5}


def test_folders_that_are_not_runs_are_refused_and_unchanged(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not a run folder and not empty"):
        opened(tmp_path, folder=tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="is not a run folder"):
        read_options(tmp_path / "mine", app="toy")
    opened(tmp_path, folder=tmp_path / "run").close()
    with pytest.raises(ConfigError, match="is a run of toy, not of other"):
        read_options(tmp_path / "run", app="other")
    (tmp_path / "run" / "run.json").write_text('{"app": "toy"')
    with pytest.raises(ConfigError, match="cannot be read as a run"):
        read_options(tmp_path / "run", app="toy")


def test_two_processes_cannot_write_to_the_same_run_folder(tmp_path):
    first = opened(tmp_path)
    second = opened(tmp_path)
    assert second.path != first.path
    with pytest.raises(ConfigError, match="another process"):
        opened(tmp_path, folder=first.path)
    first.close()
    second.close()
    opened(tmp_path, folder=first.path).close()


def test_full_disk_is_reported_and_loses_no_result(tmp_path):
    rows = [{"id": str(number), "output": str(number) * 900} for number in range(30)]
    run = opened(tmp_path)
    with run.log(key=KEY) as log:
        log.append(rows)
    for kind in ("parquet", "jsonl"):
        with (
            full_disk(100),
            pytest.raises(StokerError, match=f"results.{kind}: cannot be written: .*; free disk space"),
        ):
            run.finish(name=f"results.{kind}", write=lambda path, kind=kind: write_rows(rows, path, kind=kind))
    with full_disk(100), pytest.raises(StokerError, match=r"summary\.json: cannot be written: .*; free disk space"):
        run.write_json("summary.json", rows)
    assert sorted(os.listdir(run.path)) == [".lock", PART, "run.json"]
    run.close()
    assert opened(tmp_path).resumed


def test_run_that_failed_to_start_can_start_again_in_its_folder(tmp_path):
    for _ in range(2):
        with full_disk(10), pytest.raises(StokerError, match=r"run\.json: cannot be written"):
            opened(tmp_path, folder=tmp_path / "run")
    (tmp_path / "run" / ".run.json.tmp").write_text("{")
    run = opened(tmp_path, folder=tmp_path / "run")
    assert not run.resumed
    run.close()
    assert read_options(tmp_path / "run", app="toy") == {"limit": 5}


def test_incomplete_run_is_continued_and_its_results_remade(tmp_path):
    first = opened(tmp_path)
    with first.log(key=KEY) as log:
        log.append([{"id": "1"}])
        first.finish(name="results.parquet", write=lambda path: path.write_text("some") and None, complete=False)
    first.close()
    assert not is_finished(first.path)
    again = opened(tmp_path, folder=first.path)
    assert again.resumed
    with again.log(key=KEY) as log:
        assert len(log) == 1
        again.finish(name="results.jsonl", write=lambda path: path.write_text("all") and None)
    again.close()
    assert sorted(os.listdir(first.path)) == [".lock", "results.jsonl", "run.json"]
    with pytest.raises(ConfigError, match=r"this run is finished, its results are in .*results\.jsonl"):
        opened(tmp_path, folder=first.path)


def test_runs_started_at_the_same_time_get_separate_folders(tmp_path):
    many, rounds = 8, 20
    barrier = threading.Barrier(many)

    def start(number):
        barrier.wait()
        return opened(tmp_path / "runs", parameters={"seed": number}, fresh=True)

    paths = []
    with concurrent.futures.ThreadPoolExecutor(many) as threads:
        for _ in range(rounds):
            runs = list(threads.map(start, range(many)))
            paths += [run.path for run in runs]
            for run in runs:
                run.close()
    assert len(set(paths)) == many * rounds
    assert all(path.name.startswith("toy-") for path in paths)


def test_run_root_that_is_not_a_folder_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for root in ("file", "nowhere"):
        with pytest.raises(ConfigError, match=f"{root}.*: (is not a folder|cannot be made: Not a directory)"):
            opened(tmp_path / root)


# ---- the log of results


RECORD_KEY = ("p", "id")


def record(number, prompt="x"):
    return {"p": prompt, "id": str(number), "text": f"é\n{number}"}


def test_appended_records_are_read_again(tmp_path):
    with RecordLog(tmp_path / "log", key=RECORD_KEY) as log:
        assert log.append([record(1), record(2)]) == 2
        assert log.append([record(2), record(3), record(3)]) == 1
    with RecordLog(tmp_path / "log", key=RECORD_KEY) as log:
        assert list(log) == [record(1), record(2), record(3)]
        assert ("x", "2") in log
        assert ("y", "2") not in log
        assert log.get(("x", "3")) == record(3)
        assert log.dropped_bytes == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 8), cut=st.floats(0, 1), again=st.integers(0, 10))
def test_truncated_log_keeps_every_complete_record(tmp_path, count, cut, again):
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    with RecordLog(path, key=RECORD_KEY) as log:
        log.append(record(number) for number in range(count))
    whole = path.read_bytes()
    at = round(cut * len(whole))
    path.write_bytes(whole[:at])
    complete = whole[:at].count(b"\n")
    with RecordLog(path, key=RECORD_KEY) as log:
        assert list(log) == [record(number) for number in range(complete)]
        # A resumed log writes the missing records, and writes no record twice.
        log.append(record(number) for number in range(max(count, again)))
    with RecordLog(path, key=RECORD_KEY) as log:
        assert list(log) == [record(number) for number in range(max(count, again))]
    assert path.read_bytes().count(b"\n") == max(count, again)


def test_damaged_line_before_the_last_is_named(tmp_path):
    (tmp_path / "log").write_bytes(b'{"p":"x","id":"1"}\n{"p":"x"}\n{"p":"x","id":"2"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        RecordLog(tmp_path / "log", key=RECORD_KEY)


def test_full_disk_leaves_no_torn_record(tmp_path):
    path = tmp_path / "log"
    with RecordLog(path, key=RECORD_KEY) as log:
        log.append([record(1)])
        before = path.read_bytes()
        with full_disk(len(before) + 5), pytest.raises(StokerError, match="the 1 earlier results are kept"):
            log.append([record(2)])
        assert path.read_bytes() == before
        assert log.append([record(2)]) == 1
    with RecordLog(path, key=RECORD_KEY) as log:
        assert list(log) == [record(1), record(2)]
