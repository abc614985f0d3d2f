from __future__ import annotations

import asyncio
import datetime
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from gateway.loops import in_loop, until
from gateway.program_batches import ProgramBatches
from gateway.test_gateway_batches import take_all

from stoker.apps.batch_inference.run import Permits
from stoker.apps.common.models_file import ModelSettings
from stoker.apps.common.openai_requests import Endpoint, RequestRefused
from stoker.apps.gateway import cli, usage
from stoker.apps.gateway.batch_process import BatchPace
from stoker.apps.gateway.figures import GatewayMetrics, RunningRequest
from stoker.apps.gateway.keys import Guard, KeyFile, KeyLimits
from stoker.apps.gateway.served import ServedModel
from stoker.apps.gateway.usage import UsageCount, UsageFile, UsageQuery, UsageRecorder, first_day, read_query, today
from stoker.apps.gateway.wire import ClientLeft
from stoker.errors import ConfigError, ContextError

ALL = UsageQuery("2000-01-01")
LOCKS = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(usage, "_LOCKED_S", 0.05)
    return UsageFile(tmp_path / "serve" / "usage.sqlite")


def rows(file: UsageFile, query: UsageQuery = ALL) -> list[SimpleNamespace]:
    return [SimpleNamespace(**row) for row in file.read(query)]


def requests_in(file: UsageFile, query: UsageQuery = ALL) -> dict[tuple[str, str], int]:
    return {(row.key, row.model): row.requests for row in rows(file, query)}


def count(recorder: UsageRecorder, key: str = "ana", model: str = "small", requests: int = 1) -> None:
    recorder.count(UsageCount(requests, 3, 4), key=key, model=model)


# ---- the file


def test_counts_are_summed_by_key_model_and_day(file):
    days = [(datetime.date.today() - datetime.timedelta(days=ago)).isoformat() for ago in (0, 1, 9)]
    for day in days:
        file.add({(day, "ana", "small"): UsageCount(1, 10, 5, 1, 0), (day, "ben", "small"): UsageCount(2)})
        file.add({(day, "ana", "small"): UsageCount(1, 10, 5, 0, 1)})
    week, *_ = rows(file, UsageQuery(first_day("7d")))
    assert (week.key, week.requests, week.prompt_tokens, week.completion_tokens) == ("ana", 4, 40, 20)
    assert (week.refused, week.failed) == (2, 2)
    assert [row.day for row in rows(file, UsageQuery(days[2], by=("day",)))] == sorted(days)
    assert [row.requests for row in rows(file, UsageQuery(days[2], key="ben", by=("model",)))] == [6]
    assert file.read(UsageQuery(days[2], model="other")) == []


def test_usage_counts_older_than_400_days_are_removed(file):
    old, kept = first_day("401d"), first_day("400d")
    file.add({(old, "ana", "small"): UsageCount(1), (kept, "ana", "small"): UsageCount(1)})
    assert [row.day for row in rows(file, UsageQuery("2000-01-01", by=("day",)))] == [kept]


def test_usage_file_is_readable_by_its_owner_alone(file):
    assert file.read(ALL) == []
    file.add({(today(), "ana", "small"): UsageCount(1)})
    assert file.path.stat().st_mode & 0o077 == 0


def test_usage_is_written_after_the_lock_on_its_file_ends(file, caplog):
    file.add({(today(), "ana", "small"): UsageCount(1)})
    recorder = UsageRecorder(file)
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKS, str(file.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        for _ in range(3):
            count(recorder)
            recorder.flush()
        assert caplog.text.count("usage cannot be written: database is locked") == 1
        holder.communicate()
    recorder.flush()
    assert requests_in(file) == {("ana", "small"): 4}


def test_unwritable_usage_file_loses_no_count(file, caplog):
    recorder = UsageRecorder(file)
    file.path.parent.mkdir()
    file.path.mkdir()
    count(recorder)
    recorder.flush()
    file.path.rmdir()
    file.path.write_text("no database at all, but a text of more than a hundred bytes" * 2)
    recorder.flush()
    assert caplog.text.count("usage cannot be written") == 1
    file.path.unlink()
    recorder.begin()
    recorder.end()
    assert requests_in(file) == {("ana", "small"): 1}


# ---- requests


def test_each_request_is_counted_once_with_its_outcome(file):
    recorder = UsageRecorder(file)
    metrics, model = GatewayMetrics(recorder), ServedModel("small", ModelSettings(path="m"))
    limit = RequestRefused("", type="rate_limit_error", code="c", status=429)
    late = RequestRefused("", type="overloaded", code="objective_unreachable", status=503)
    for error in (None, ClientLeft(), asyncio.CancelledError(), limit, late, ContextError("x"), RequestRefused("x")):
        figures = RunningRequest(metrics, model, Endpoint.CHAT, begun=0.0, key="ana")
        figures.tokens = (2, 1)
        figures.end(error)
    metrics.count_usage(model, key="", error=late)
    recorder.flush()
    nobody, ana = rows(file)
    assert (ana.requests, ana.prompt_tokens, ana.completion_tokens, ana.refused, ana.failed) == (7, 14, 7, 2, 2)
    assert (nobody.key, nobody.requests, nobody.refused) == ("-", 1, 1)


@pytest.mark.parametrize(
    ("given", "param"), [({"by": "hour"}, "by"), ({"since": "monday"}, "since"), ({"models": "x"}, "models")]
)
def test_error_for_an_unknown_usage_filter_names_the_filter(given, param):
    with pytest.raises(RequestRefused) as refused:
        read_query(given)
    assert refused.value.error.param == param
    assert read_query({"by": "day,key", "since": "2026-01-31"}) == UsageQuery("2026-01-31", by=("day", "key"))


# ---- batches


@in_loop
async def test_requests_of_a_batch_count_once_over_restarts(file, tmp_path):
    first, second = UsageRecorder(file), UsageRecorder(file)
    batches = ProgramBatches(tmp_path, usage=first)
    batch = await batches.begun(model="small")
    await until(lambda: first.flush() or requests_in(file).get(("-", "small")) == 3)
    await batches.leave()
    later = ProgramBatches(tmp_path, usage=second)
    later.resume()
    later.cancel(batch.id, owner="")
    assert (await later.over(batch.id)).status == "cancelled"
    second.flush()
    [row] = rows(file)
    assert (row.requests, row.failed, row.prompt_tokens, row.completion_tokens) == (3, 1, 20, 4)


# ---- groups


@pytest.fixture
def keys(tmp_path):
    return KeyFile(tmp_path / "keys.json")


def test_keys_of_a_group_share_its_limits(keys):
    keys.set_group("lab1", KeyLimits(concurrent=2))
    keys.add("ana", KeyLimits(concurrent=1), group="lab1")
    keys.add("ben", KeyLimits(), group="lab1")
    guard = Guard(keys)
    ana, ben = guard.caller_by_key_name("ana"), guard.caller_by_key_name("ben")
    held = guard.begin(ana)
    with pytest.raises(RequestRefused, match="1 requests of this key are running"):
        guard.begin(ana)
    other = guard.begin(ben)
    with pytest.raises(RequestRefused, match="2 requests of the group lab1 are running, and at most 2 may run"):
        guard.begin(ben)
    held.tokens = 50
    held.end()
    keys.set_group("lab1", KeyLimits(tokens_per_minute=40))
    with pytest.raises(RequestRefused, match="the group lab1 may read and write 40 tokens a minute, and has used 50"):
        guard.begin(guard.caller_by_key_name("ben"))
    other.end()


def test_request_refused_by_its_group_does_not_count(keys):
    keys.set_group("lab1", KeyLimits(requests_per_minute=1))
    keys.add("ana", KeyLimits(), group="lab1")
    keys.add("ben", KeyLimits(requests_per_minute=1), group="lab1")
    guard = Guard(keys)
    guard.begin(guard.caller_by_key_name("ana")).end()
    with pytest.raises(RequestRefused, match="the group lab1 may send 1 requests a minute"):
        guard.begin(guard.caller_by_key_name("ben"))
    keys.set_group("lab1", KeyLimits())
    guard.begin(guard.caller_by_key_name("ben")).end()


def test_batches_share_the_limits_of_their_group(keys, tmp_path):
    keys.set_group("lab1", KeyLimits(tokens_per_minute=1000))
    guard, paces = Guard(keys), []
    for name in ("ana", "ben"):
        keys.add(name, KeyLimits(), group="lab1")
        pace = BatchPace(tmp_path / f"{name}.permits", guard, owner=name)
        pace.begin(left=100)
        paces.append((pace, Permits(tmp_path / f"{name}.permits")))
    assert [take_all(*each) for each in paces] == [1, 1]  # the token counts are still unknown
    for _, permits in paces:
        permits.end(100)
    assert sum(take_all(*each) for each in paces) == 8  # batches may use 900 tokens, and have used 100 or 200 tokens


@in_loop
async def test_stopped_batch_counts_the_tokens_of_its_requests(keys, tmp_path):
    keys.add("ana", KeyLimits(tokens_per_minute=1000))
    guard = Guard(keys)
    pace, permits = BatchPace(tmp_path / "p", guard, owner="ana"), Permits(tmp_path / "p")
    pace.begin(left=100)
    take_all(pace, permits)
    permits.end(100)
    assert take_all(pace, permits) == 8
    permits.end(100)
    keeping = asyncio.create_task(pace.keep())
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait({keeping})
    with pytest.raises(RequestRefused, match=r"has used 1,000|has used 900"):
        guard.begin(guard.caller_by_key_name("ana"), used=KeyLimits.limits_for_batches)


def test_invalid_changes_to_key_groups_are_refused(keys):
    with pytest.raises(ConfigError, match="there is no group lab1; make it first: stoker serve groups set lab1"):
        keys.add("ana", KeyLimits(), group="lab1")
    with pytest.raises(ConfigError, match="is not a name for a group"):
        keys.set_group("a b", KeyLimits())
    keys.set_group("lab1", KeyLimits())
    keys.add("ana", KeyLimits(), group="lab1")
    with pytest.raises(ConfigError, match="the group lab1 has keys: ana; remove them first"):
        keys.remove_group("lab1")
    keys.remove("ana")
    keys.remove_group("lab1")
    with pytest.raises(ConfigError, match="there is no group lab1; there are: none"):
        keys.remove_group("lab1")


# ---- the command line


def serve(*words: str):
    return CliRunner().invoke(cli.command, list(words))


def test_usage_command_prints_a_table_json_or_csv(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))
    assert "no requests since" in serve("usage").output
    UsageFile.usual().add(
        {
            (today(), "ana", "small"): UsageCount(1200, 10, 5, 1, 0),
            (today(), "ben", "small"): UsageCount(2),
            ("2026-01-01", "ben", "large"): UsageCount(2),
        }
    )
    head, ana, ben, total = serve("usage").output.splitlines()
    assert head.split() == ["key", "model", "requests", "tokens", "read", "written", "refused", "failed"]
    assert ana.split() == ["ana", "small", "1,200", "10", "5", "1", "0"]
    assert (ben.split()[0], total.split()[:2]) == ("ben", ["all", "1,202"])
    said = json.loads(serve("usage", "--key", "ben", "--by", "day", "--json").output)
    assert [(row["day"], row["requests"]) for row in said["usage"]] == [(today(), 2)]
    assert serve("usage", "--csv", "--by", "model").output.splitlines()[1] == "small,1202,10,5,1,0"
    assert "is not a time" in serve("usage", "--since", "monday").output


def test_command_line_manages_keys_and_groups(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))
    assert "there are no groups" in serve("groups", "list").output
    assert "100 tokens a minute" in serve("groups", "set", "lab1", "--tokens-per-minute", "100").output
    serve("keys", "add", "ana", "--group", "lab1", "--admin", "--concurrent", "2")
    assert "2 at a time; in the group lab1; sees all usage" in serve("keys", "list").output
    assert "100 tokens a minute; keys: ana" in serve("groups", "list").output
    before = KeyFile.usual().current().keys["ana"].digest
    assert "no limits; in the group lab1" in serve("keys", "set", "ana", "--group", "lab1").output
    assert KeyFile.usual().current().keys["ana"].digest == before, "the key stays valid"
    assert "there is no key eve; there are: ana" in str(serve("keys", "set", "eve").exception)
    [group] = json.loads(serve("groups", "list", "--json").output)["groups"]
    assert (group["name"], group["keys"], group["limits"]["tokens_per_minute"]) == ("lab1", ["ana"], 100)


def test_usage_command_reports_a_database_without_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))
    UsageFile.usual().path.parent.mkdir()
    with closing(sqlite3.connect(UsageFile.usual().path)) as database:
        database.execute("CREATE TABLE other (x)")
    assert "cannot be read: no such table: usage" in str(serve("usage").exception)
