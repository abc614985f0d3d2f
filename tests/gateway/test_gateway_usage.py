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

from stoker.apps.batch_inference.run import BatchPermits
from stoker.apps.common.models_file import ModelSettings
from stoker.apps.common.openai_requests import Endpoint, RequestRefused
from stoker.apps.gateway import cli, usage
from stoker.apps.gateway.batch_process import BatchPermitGranter
from stoker.apps.gateway.figures import GatewayMetrics, RunningRequest
from stoker.apps.gateway.keys import KeyFile, KeyGuard, KeyLimits
from stoker.apps.gateway.served import ServedModel
from stoker.apps.gateway.usage import (
    UsageCount,
    UsageFile,
    UsageQuery,
    UsageRecorder,
    format_today,
    parse_first_day,
    parse_usage_query,
)
from stoker.apps.gateway.wire import ClientDisconnected
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
    return [SimpleNamespace(**row) for row in file.read_report(query)]


def requests_in(file: UsageFile, query: UsageQuery = ALL) -> dict[tuple[str, str], int]:
    return {(row.key, row.model): row.requests for row in rows(file, query)}


def count(recorder: UsageRecorder, key: str = "ana", model: str = "small", requests: int = 1) -> None:
    recorder.add_count(UsageCount(requests, 3, 4), key=key, model=model)


# ---- the file


def test_counts_are_summed_by_key_model_and_day(file):
    days = [(datetime.date.today() - datetime.timedelta(days=ago)).isoformat() for ago in (0, 1, 9)]
    for day in days:
        file.add_counts({(day, "ana", "small"): UsageCount(1, 10, 5, 1, 0), (day, "ben", "small"): UsageCount(2)})
        file.add_counts({(day, "ana", "small"): UsageCount(1, 10, 5, 0, 1)})
    week, *_ = rows(file, UsageQuery(parse_first_day("7d")))
    assert (week.key, week.requests, week.prompt_tokens, week.completion_tokens) == ("ana", 4, 40, 20)
    assert (week.refused, week.failed) == (2, 2)
    assert [row.day for row in rows(file, UsageQuery(days[2], by=("day",)))] == sorted(days)
    assert [row.requests for row in rows(file, UsageQuery(days[2], key="ben", by=("model",)))] == [6]
    assert file.read_report(UsageQuery(days[2], model="other")) == []


def test_usage_counts_older_than_400_days_are_removed(file):
    old, kept = parse_first_day("401d"), parse_first_day("400d")
    file.add_counts({(old, "ana", "small"): UsageCount(1), (kept, "ana", "small"): UsageCount(1)})
    assert [row.day for row in rows(file, UsageQuery("2000-01-01", by=("day",)))] == [kept]


def test_usage_file_is_readable_by_its_owner_alone(file):
    assert file.read_report(ALL) == []
    file.add_counts({(format_today(), "ana", "small"): UsageCount(1)})
    assert file.path.stat().st_mode & 0o077 == 0


def test_usage_is_written_after_the_lock_on_its_file_ends(file, caplog):
    file.add_counts({(format_today(), "ana", "small"): UsageCount(1)})
    recorder = UsageRecorder(file)
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKS, str(file.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        for _ in range(3):
            count(recorder)
            recorder.write_counts()
        assert caplog.text.count("usage cannot be written: database is locked") == 1
        holder.communicate()
    recorder.write_counts()
    assert requests_in(file) == {("ana", "small"): 4}


def test_unwritable_usage_file_loses_no_count(file, caplog):
    recorder = UsageRecorder(file)
    file.path.parent.mkdir()
    file.path.mkdir()
    count(recorder)
    recorder.write_counts()
    file.path.rmdir()
    file.path.write_text("no database at all, but a text of more than a hundred bytes" * 2)
    recorder.write_counts()
    assert caplog.text.count("usage cannot be written") == 1
    file.path.unlink()
    recorder.start_writing()
    recorder.stop_writing()
    assert requests_in(file) == {("ana", "small"): 1}


# ---- requests


def test_each_request_is_counted_once_with_its_outcome(file):
    recorder = UsageRecorder(file)
    metrics, model = GatewayMetrics(recorder), ServedModel("small", ModelSettings(path="m"))
    limit = RequestRefused("", type="rate_limit_error", code="c", status=429)
    late = RequestRefused("", type="overloaded", code="objective_unreachable", status=503)
    for error in (
        None,
        ClientDisconnected(),
        asyncio.CancelledError(),
        limit,
        late,
        ContextError("x"),
        RequestRefused("x"),
    ):
        figures = RunningRequest(metrics, model, Endpoint.CHAT, begun=0.0, key="ana")
        figures.tokens = (2, 1)
        figures.end_request(error)
    metrics.count_usage(model, key="", error=late)
    recorder.write_counts()
    nobody, ana = rows(file)
    assert (ana.requests, ana.prompt_tokens, ana.completion_tokens, ana.refused, ana.failed) == (7, 14, 7, 2, 2)
    assert (nobody.key, nobody.requests, nobody.refused) == ("-", 1, 1)


@pytest.mark.parametrize(
    ("given", "param"), [({"by": "hour"}, "by"), ({"since": "monday"}, "since"), ({"models": "x"}, "models")]
)
def test_error_for_an_unknown_usage_filter_names_the_filter(given, param):
    with pytest.raises(RequestRefused) as refused:
        parse_usage_query(given)
    assert refused.value.error.param == param
    assert parse_usage_query({"by": "day,key", "since": "2026-01-31"}) == UsageQuery("2026-01-31", by=("day", "key"))


# ---- batches


@in_loop
async def test_requests_of_a_batch_count_once_over_restarts(file, tmp_path):
    first, second = UsageRecorder(file), UsageRecorder(file)
    batches = ProgramBatches(tmp_path, usage=first)
    batch = await batches.begun(model="small")
    await until(lambda: first.write_counts() or requests_in(file).get(("-", "small")) == 3)
    await batches.stop_all()
    later = ProgramBatches(tmp_path, usage=second)
    later.resume_open_batches()
    later.cancel_batch(batch.id, owner="")
    assert (await later.over(batch.id)).status == "cancelled"
    second.write_counts()
    [row] = rows(file)
    assert (row.requests, row.failed, row.prompt_tokens, row.completion_tokens) == (3, 1, 20, 4)


# ---- groups


@pytest.fixture
def keys(tmp_path):
    return KeyFile(tmp_path / "keys.json")


def test_keys_of_a_group_share_its_limits(keys):
    keys.set_group("lab1", KeyLimits(concurrent=2))
    keys.add_key("ana", KeyLimits(concurrent=1), group="lab1")
    keys.add_key("ben", KeyLimits(), group="lab1")
    guard = KeyGuard(keys)
    ana, ben = guard.find_caller_by_key_name("ana"), guard.find_caller_by_key_name("ben")
    held = guard.begin_request(ana)
    with pytest.raises(RequestRefused, match="1 requests of this key are running"):
        guard.begin_request(ana)
    other = guard.begin_request(ben)
    with pytest.raises(RequestRefused, match="2 requests of the group lab1 are running, and at most 2 may run"):
        guard.begin_request(ben)
    held.tokens = 50
    held.end_request()
    keys.set_group("lab1", KeyLimits(tokens_per_minute=40))
    with pytest.raises(RequestRefused, match="the group lab1 may read and write 40 tokens a minute, and has used 50"):
        guard.begin_request(guard.find_caller_by_key_name("ben"))
    other.end_request()


def test_request_refused_by_its_group_does_not_count(keys):
    keys.set_group("lab1", KeyLimits(requests_per_minute=1))
    keys.add_key("ana", KeyLimits(), group="lab1")
    keys.add_key("ben", KeyLimits(requests_per_minute=1), group="lab1")
    guard = KeyGuard(keys)
    guard.begin_request(guard.find_caller_by_key_name("ana")).end_request()
    with pytest.raises(RequestRefused, match="the group lab1 may send 1 requests a minute"):
        guard.begin_request(guard.find_caller_by_key_name("ben"))
    keys.set_group("lab1", KeyLimits())
    guard.begin_request(guard.find_caller_by_key_name("ben")).end_request()


def test_batches_share_the_limits_of_their_group(keys, tmp_path):
    keys.set_group("lab1", KeyLimits(tokens_per_minute=1000))
    guard, paces = KeyGuard(keys), []
    for name in ("ana", "ben"):
        keys.add_key(name, KeyLimits(), group="lab1")
        pace = BatchPermitGranter(tmp_path / f"{name}.permits", guard, owner=name)
        pace.start_granting(unanswered=100)
        paces.append((pace, BatchPermits(tmp_path / f"{name}.permits")))
    assert [take_all(*each) for each in paces] == [1, 1]  # the token counts are still unknown
    for _, permits in paces:
        permits.count_ended_call(100)
    assert sum(take_all(*each) for each in paces) == 8  # batches may use 900 tokens, and have used 100 or 200 tokens


@in_loop
async def test_stopped_batch_counts_the_tokens_of_its_requests(keys, tmp_path):
    keys.add_key("ana", KeyLimits(tokens_per_minute=1000))
    guard = KeyGuard(keys)
    pace, permits = BatchPermitGranter(tmp_path / "p", guard, owner="ana"), BatchPermits(tmp_path / "p")
    pace.start_granting(unanswered=100)
    take_all(pace, permits)
    permits.count_ended_call(100)
    assert take_all(pace, permits) == 8
    permits.count_ended_call(100)
    keeping = asyncio.create_task(pace.grant_until_cancelled())
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait({keeping})
    with pytest.raises(RequestRefused, match=r"has used 1,000|has used 900"):
        guard.begin_request(guard.find_caller_by_key_name("ana"), used=KeyLimits.reduce_for_batches)


def test_invalid_changes_to_key_groups_are_refused(keys):
    with pytest.raises(ConfigError, match="there is no group lab1; make it first: stoker serve groups set lab1"):
        keys.add_key("ana", KeyLimits(), group="lab1")
    with pytest.raises(ConfigError, match="is not a name for a group"):
        keys.set_group("a b", KeyLimits())
    keys.set_group("lab1", KeyLimits())
    keys.add_key("ana", KeyLimits(), group="lab1")
    with pytest.raises(ConfigError, match="the group lab1 has keys: ana; remove them first"):
        keys.remove_group("lab1")
    keys.remove_key("ana")
    keys.remove_group("lab1")
    with pytest.raises(ConfigError, match="there is no group lab1; there are: none"):
        keys.remove_group("lab1")


# ---- the command line


def serve(*words: str):
    return CliRunner().invoke(cli.command, list(words))


def test_usage_command_prints_a_table_json_or_csv(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))
    assert "no requests since" in serve("usage").output
    UsageFile.at_default_path().add_counts(
        {
            (format_today(), "ana", "small"): UsageCount(1200, 10, 5, 1, 0),
            (format_today(), "ben", "small"): UsageCount(2),
            ("2026-01-01", "ben", "large"): UsageCount(2),
        }
    )
    head, ana, ben, total = serve("usage").output.splitlines()
    assert head.split() == ["key", "model", "requests", "tokens", "read", "written", "refused", "failed"]
    assert ana.split() == ["ana", "small", "1,200", "10", "5", "1", "0"]
    assert (ben.split()[0], total.split()[:2]) == ("ben", ["all", "1,202"])
    said = json.loads(serve("usage", "--key", "ben", "--by", "day", "--json").output)
    assert [(row["day"], row["requests"]) for row in said["usage"]] == [(format_today(), 2)]
    assert serve("usage", "--csv", "--by", "model").output.splitlines()[1] == "small,1202,10,5,1,0"
    assert "is not a time" in serve("usage", "--since", "monday").output


def test_command_line_manages_keys_and_groups(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))
    assert "there are no groups" in serve("groups", "list").output
    assert "100 tokens a minute" in serve("groups", "set", "lab1", "--tokens-per-minute", "100").output
    serve("keys", "add", "ana", "--group", "lab1", "--admin", "--concurrent", "2")
    assert "2 at a time; in the group lab1; sees all usage" in serve("keys", "list").output
    assert "100 tokens a minute; keys: ana" in serve("groups", "list").output
    before = KeyFile.at_default_path().read_current().keys["ana"].digest
    assert "no limits; in the group lab1" in serve("keys", "set", "ana", "--group", "lab1").output
    assert KeyFile.at_default_path().read_current().keys["ana"].digest == before, "the key stays valid"
    assert "there is no key eve; there are: ana" in str(serve("keys", "set", "eve").exception)
    [group] = json.loads(serve("groups", "list", "--json").output)["groups"]
    assert (group["name"], group["keys"], group["limits"]["tokens_per_minute"]) == ("lab1", ["ana"], 100)


def test_usage_command_reports_a_database_without_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("STOKER_HOME", str(tmp_path))
    UsageFile.at_default_path().path.parent.mkdir()
    with closing(sqlite3.connect(UsageFile.at_default_path().path)) as database:
        database.execute("CREATE TABLE other (x)")
    assert "cannot be read: no such table: usage" in str(serve("usage").exception)
