from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from polling import PATIENCE_S, polls

import stoker
from stoker.contexts import payloads
from stoker.contexts.digest import digest_of_item
from stoker.errors import ConfigError, StokerError
from stoker.manager.executor.kept_file import KeptFile, KeptHeader, encode_result_line

LOAD = {"progress": False}


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "run.jsonl"


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def noted(log: Path):
    def work(item):
        with open(log, "a") as file:
            file.write(f"{item}\n")
        return [item, item * item]

    return work


def ran(log: Path):
    items = [] if not log.exists() else log.read_text().split()
    log.unlink(missing_ok=True)
    return sorted(map(int, items))


# ---- a continued run


PROGRAM = """
import os, sys, time
import stoker

def work(item):
    while item >= 20 and not os.path.exists("go"):
        time.sleep(0.01)
    with open(os.path.join({folder!r}, "ran-" + os.environ["RUN"]), "a") as file:
        file.write(f"{{item}}\\n")
    return (item, "result")

if __name__ == "__main__":
    os.chdir({folder!r})
    with stoker.load(progress=False):
        print(list(stoker.map(work, range(60), keep="run.jsonl")) == [(each, "result") for each in range(60)])
"""


def test_map_reruns_no_kept_item_after_a_kill(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(PROGRAM.format(folder=str(tmp_path))).replace('"go"', repr(str(tmp_path / "go")))
    )
    kept = tmp_path / "run.jsonl"
    first = subprocess.Popen([sys.executable, str(program)], cwd=tmp_path, env={**os.environ, "RUN": "1"})
    assert any(kept.exists() and len(lines(kept)) >= 21 for _ in polls(PATIENCE_S))
    first.kill()
    first.wait()
    before = {json.loads(line)["item"] for line in lines(kept)[1:]}
    assert before == set(range(20))
    (tmp_path / "go").touch()
    again = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path, env={**os.environ, "RUN": "2"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.stdout == "True\n", again.stderr
    assert "run.jsonl has 20 results of earlier runs; their items do not run again" in again.stderr
    assert ran(tmp_path / "ran-2") == list(range(20, 60))
    assert list(stoker.kept(kept)) == [(each, "result") for each in range(60)]


@pytest.mark.parametrize(("ordered", "batch_size"), [(True, None), (False, 3)])
def test_second_run_computes_only_missing_items(session, tmp_path, kept, ordered, batch_size):
    log = tmp_path / "log"

    def double(given):
        with open(log, "a") as file:
            file.write("".join(f"{each}\n" for each in (given if batch_size else [given])))
        return [2 * each for each in given] if batch_size else 2 * given

    def results(items):
        found = list(stoker.map(double, items, keep=kept, ordered=ordered, batch_size=batch_size))
        return found if ordered else sorted(found)

    wanted = [[2 * each for each in range(at, min(at + 3, 20))] for at in range(0, 20, 3)]
    wanted = wanted if batch_size else [2 * each for each in range(20)]
    assert results(iter(range(12))) == wanted[: 4 if batch_size else 12]
    assert ran(log) == list(range(12))
    assert results(each for each in range(20)) == wanted
    assert ran(log) == list(range(12, 20))
    assert results(range(20)) == wanted
    assert ran(log) == []


def test_leaving_a_map_loop_keeps_the_received_results(session, tmp_path, kept):
    work = noted(tmp_path / "log")
    for number, _ in enumerate(stoker.map(work, range(50), keep=kept, window=4)):
        if number == 9:
            break
    ran(tmp_path / "log")
    count = len(stoker.kept(kept))
    assert count >= 10
    assert list(stoker.map(work, range(50), keep=kept)) == [[each, each * each] for each in range(50)]
    # compare sets, because a call cancelled while it ran is in the log twice
    assert len(set(ran(tmp_path / "log"))) == 50 - count


def test_failed_items_of_a_kept_map_run_again(session, tmp_path, kept):
    flag = tmp_path / "flag"

    def work(item):
        if item == 3 and not flag.exists():
            raise ValueError("three")
        return item

    with pytest.raises(ValueError, match="three"):
        list(stoker.map(work, range(6), keep=kept))
    found = list(stoker.map(work, range(6), keep=kept, return_exceptions=True))
    assert isinstance(found.pop(3), ValueError)
    assert found == [0, 1, 2, 4, 5]
    flag.touch()
    assert list(stoker.map(work, range(6), keep=kept)) == list(range(6))


def test_items_of_a_kept_map_may_be_reordered_and_repeated(session, tmp_path, kept):
    work = noted(tmp_path / "log")
    list(stoker.map(work, [5, 1, 5, 2], keep=kept))
    assert ran(tmp_path / "log") == [1, 2, 5, 5], "equal items are separate items"
    assert list(stoker.map(work, [2, 5, 7, 5, 5], keep=kept)) == [[each, each * each] for each in [2, 5, 7, 5, 5]]
    assert ran(tmp_path / "log") == [5, 7]


def test_amap_keeps_results_and_continues_after_a_restart(session, tmp_path, kept):
    work = noted(tmp_path / "log")

    async def collect(function, count, **options):
        return [each async for each in stoker.amap(function, range(count), keep=kept, **options)]

    assert asyncio.run(collect(work, 4)) == [[each, each * each] for each in range(4)]
    assert asyncio.run(collect(work, 8)) == [[each, each * each] for each in range(8)]
    assert ran(tmp_path / "log") == list(range(8)), "each item ran once"
    changed = noted(tmp_path / "other log")
    with pytest.raises(ConfigError, match="has changed since"):
        asyncio.run(collect(changed, 8))
    assert asyncio.run(collect(changed, 8, reuse=True)) == [[each, each * each] for each in range(8)]


def test_app_that_yields_keeps_its_results_as_a_list(session, kept):
    @stoker.app
    def count(upto):
        yield from range(upto)

    for _ in range(2):
        assert list(stoker.map(count, [2, 3], keep=kept)) == [[0, 1], [0, 1, 2]]
        assert list(stoker.kept(kept)) == [[0, 1], [0, 1, 2]]


def test_result_over_one_megabyte_is_kept(session, kept):
    for _ in range(2):
        assert list(stoker.map(bytes, [3_000_000, 2], keep=kept)) == [bytes(3_000_000), bytes(2)]
    assert not list(Path(session.folder, "objects").glob("result-*"))


def test_context_and_bound_arguments_are_part_of_the_kept_key(session, kept):
    @stoker.context
    def table(factor):
        return factor

    def times(factor, item):
        return factor * item

    app = stoker.app(context=table(3))(times)
    assert list(stoker.map(app, [1, 2], keep=kept)) == [3, 6]
    with pytest.raises(
        ConfigError, match=r"the file contains results of context table-\w+, but .*times now has context table-\w+"
    ):
        stoker.map(app.with_options(context=table(4)), [1, 2], keep=kept)


def test_progress_bar_starts_with_the_kept_results(session, tmp_path, kept, capsys):
    work = noted(tmp_path / "log")
    list(stoker.map(work, range(6), keep=kept))
    capsys.readouterr()
    list(stoker.map(work, range(8), keep=kept, progress=True))
    assert "work 8/8" in capsys.readouterr().err.replace("noted.", "")


# ---- refusals


def test_kept_file_accepts_a_changed_function_only_with_reuse(session, kept):
    def made(text):
        return {1: lambda item: item + 1, 2: lambda item: item + 2}[text]

    assert list(stoker.map(made(1), [1, 2], keep=kept)) == [2, 3]
    with pytest.raises(ConfigError, match=r"has changed since \d{4}-.*name a new file.*or write reuse=True"):
        stoker.map(made(2), [1, 2], keep=kept)
    assert list(stoker.map(made(2), [1, 2, 3], keep=kept, reuse=True)) == [2, 3, 5]
    assert list(stoker.map(made(2), [1, 2, 3], keep=kept)) == [2, 3, 5], "the warning was printed once"
    with pytest.raises(
        ConfigError, match=r"the file contains results of .*, and this map calls len; name another file"
    ):
        stoker.map(len, ["a"], keep=kept, reuse=True)
    with pytest.raises(ConfigError, match=r"single items, and this map has batches of 2; name another file"):
        stoker.map(made(2), [1], keep=kept, batch_size=2, reuse=True)


def test_keep_path_that_cannot_be_a_file_is_refused(session):
    for keep, words in (
        ("no/such/run.jsonl", "folder no/such does not exist"),
        (".", "is a folder; name a file in it"),
    ):
        with pytest.raises(ConfigError, match=words):
            stoker.map(abs, [1], keep=keep)
    with pytest.raises(ConfigError, match="reuse=True has no effect without keep="):
        stoker.map(abs, [1], reuse=True)


def test_keep_file_with_other_content_is_left_unchanged(session, kept):
    kept.write_text('{"claim": "the sky is blue"}\n')
    with pytest.raises(ConfigError, match="is not a file of kept results"):
        stoker.map(abs, [1], keep=kept)
    with pytest.raises(ConfigError, match="is not a file of kept results"):
        stoker.kept(kept)
    assert kept.read_text() == '{"claim": "the sky is blue"}\n'


def test_two_maps_cannot_keep_results_in_one_file(session, kept):
    stream = stoker.map(abs, [1, 2], keep=kept)
    with pytest.raises(
        ConfigError, match=rf"pid {os.getpid()} .*is writing results to this file; wait until that program ends"
    ):
        stoker.map(abs, [1, 2], keep=kept)
    stream.close()
    assert list(stoker.map(abs, [1, 2], keep=kept)) == [1, 2]


# ---- the file


HEADER = KeptHeader("work", code="c")


def key(number):
    return digest_of_item(number)


def written(path, results, *, start=0):
    file = KeptFile(path)
    if file.header is None:
        file.write_header(HEADER)
    file.append_results(
        [encode_result_line(key(start + at), start + at, payloads.dumps(each)) for at, each in enumerate(results)]
    )
    file.close()


VALUES = [1, 0.5, "a – b", None, [1, {"a": True}], (1, 2), {1: 2}, {1, 2}, b"bytes", float("inf"), "\udc80", 10**5000]


def test_kept_values_equal_the_original_values(kept):
    written(kept, VALUES)
    found = list(stoker.kept(kept))
    assert found == VALUES
    assert [type(each) for each in found] == [type(each) for each in VALUES]
    plain = [json.loads(line) for line in lines(kept)[1:]]
    assert [each["result"] for each in plain if "result" in each] == VALUES[:5]
    assert list(stoker.kept(kept).items) == list(range(len(VALUES)))
    array = np.arange(1_000_000, dtype="float64")
    written(kept, [array, "last"], start=len(VALUES))
    *_, found, last = stoker.kept(kept)
    assert last == "last"
    assert (found == array).all()
    found[0] = 5.0


@pytest.mark.parametrize("torn", [1, 7, 30, 200])
def test_incomplete_last_line_of_a_kept_file_is_removed(kept, torn):
    written(kept, ["x" * 200, "y" * 200])
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-torn])
    assert list(stoker.kept(kept)) == ["x" * 200], "a reader skips the line"
    file = KeptFile(kept)
    assert file.take_result_offset(key(0)) is not None
    assert file.take_result_offset(key(1)) is None
    file.append_results([encode_result_line(key(1), 1, payloads.dumps("y" * 200))])
    file.close()
    assert kept.read_bytes() == whole


def test_item_of_a_damaged_record_runs_again(kept):
    written(kept, ["x" * 200, "y" * 200, "z"])
    whole = lines(kept)
    damaged = [whole[0], whole[1].replace(b"xxx", b"xax", 1), b"\0" * 100 + whole[2], whole[3]]
    kept.write_bytes(b"".join(damaged))
    file = KeptFile(kept)
    assert file.damaged == 1, "the line of zeros"
    assert [file.take_result_offset(key(each)) is not None for each in range(3)] == [False, False, True]
    file.close()
    with pytest.raises(StokerError, match="is damaged; run the map with keep= again to compute this item again"):
        list(stoker.kept(kept))
    written(kept, ["again"])
    assert list(stoker.kept(kept)) == ["again", "z"]


def test_incomplete_header_is_rewritten_and_damaged_header_refused(kept):
    kept.write_bytes(HEADER.encode_line()[:12])
    written(kept, ["x"])
    assert list(stoker.kept(kept)) == ["x"]
    damaged = kept.read_bytes().replace(b'"function":', b'"function";', 1)
    kept.write_bytes(damaged)
    with pytest.raises(ConfigError, match="the first line is damaged"):
        KeptFile(kept)
    assert kept.read_bytes() == damaged


def test_write_error_of_the_disk_ends_the_map(session, kept, monkeypatch):
    sync = os.fsync

    def refuse(descriptor):
        if os.path.samestat(os.fstat(descriptor), kept.stat()):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        StokerError, match="the disk failed to write: Disk quota exceeded; the last results may be lost"
    ):
        list(stoker.map(abs, [1, 2], keep=kept))


def test_full_disk_leaves_only_complete_results(kept):
    written(kept, ["x" * 1000])
    before = kept.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 2_000_000, hard))
    try:
        with pytest.raises(
            StokerError, match="cannot be written: File too large; the file has the 1 results before this result"
        ):
            written(kept, ["y" * 500_000, "z" * 3_000_000], start=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept.read_bytes() == before
