from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import sqlite3
from contextlib import ExitStack, closing, suppress

import psutil
import pytest
from gateway.asking import BODY, CHAT
from gateway.loops import in_loop
from gateway.running import LIMIT_S, stoker, until

from stoker.apps.gateway import workers as workers_module
from stoker.apps.gateway.keys import KeyFile, KeyGuard
from stoker.apps.gateway.workers import GatewayPeer, GatewayWorkers, WorkerTask

NUMBER = 2
LONG = {**BODY, "max_tokens": 1900, "stream": True}
MEDIUM = {**LONG, "max_tokens": 300}
SHORT = {**BODY, "max_tokens": 4}


@pytest.fixture(scope="module")
def serve_options():
    return ["--workers", str(NUMBER)]


def workers_of(gateway):
    children = psutil.Process(gateway.pid).children()
    return [child for child in children if "stoker.apps.gateway.worker" in child.cmdline()]


class Connection(http.client.HTTPConnection):
    """A connection to one worker. `key`: sent with each request."""

    key = ""

    def ask(self, method, path, body=None):
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
        return self.getresponse()

    def read(self, method, path, body=None):
        answer = self.ask(method, path, body)
        return answer.status, answer.read()

    def found(self, path):
        status, data = self.read("GET", path)
        assert status == 200, data
        return data


def has_connection(worker, port):
    return any(each.raddr and each.raddr.port == port for each in worker.net_connections())


@pytest.fixture
def connect(gateway):
    with ExitStack() as stack:

        def connections(key=""):
            found = {}

            def complete():
                one = stack.enter_context(closing(Connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))))
                one.timeout, one.key = LIMIT_S, key
                one.connect()
                assert one.found("/health")  # a worker has accepted the connection
                port = one.sock.getsockname()[1]
                [worker] = [each for each in workers_of(gateway) if has_connection(each, port)]
                found.setdefault(worker.pid, one)
                return len(found) == NUMBER

            until(complete, why="a connection to each worker")
            return list(found.items())

        yield connections


def metric(connection, name):
    text = connection.found("/metrics").decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def workers_in(connection):
    return json.loads(connection.found("/status"))["workers"]


def row_of_status(gateway):
    return next((line for line in stoker("status", gateway.session).splitlines() if "served at" in line), "")


# ---- one gateway


@pytest.mark.slow
def test_each_worker_shows_metrics_usage_and_files_of_all_workers(gateway, connect, key, world):
    own = key(name="eve")  # a name that no other test counts
    [(_, one), (_, two)] = connect(own)
    done = "stoker_gateway_requests_total"
    before = metric(one, done)
    ids = set()
    for connection in (one, two, one, two, two):
        answer = connection.ask("POST", CHAT, SHORT)
        assert (answer.status, bool(answer.read())) == (200, True)
        ids.add(answer.headers["x-request-id"])
    assert len(ids) == 5
    for connection in (one, two):
        until(lambda asked=connection: metric(asked, done) == before + 5, why="the last request has been counted")
    row = re.compile(rf"by {NUMBER} workers(, \d+ restarts?)? \(pid {gateway.pid}")
    until(lambda: row.search(row_of_status(gateway)), why="the gateway's note")

    def requests():
        database = sqlite3.connect(world.home / "serve" / "usage.sqlite")
        with closing(database), suppress(sqlite3.OperationalError):  # no worker has created the table yet
            return database.execute("SELECT SUM(requests) FROM usage WHERE key = 'eve'").fetchone()[0]
        return 0

    until(lambda: requests() == 5, why="both workers write into one database")

    data = os.urandom(3_000_000).hex().encode()
    head = b'--x\r\nContent-Disposition: form-data; name="%b"'
    form = head % b"purpose" + b"\r\n\r\nbatch\r\n" + head % b"file" + b'; filename="r.jsonl"\r\n\r\n' + data
    headers = {"Content-Type": "multipart/form-data; boundary=x", "Authorization": f"Bearer {own}"}
    one.request("POST", "/v1/files", form + b"\r\n--x--\r\n", headers)
    stored = json.loads(one.getresponse().read())
    assert two.found(f"/v1/files/{stored['id']}/content") == data


@pytest.mark.slow
def test_limits_of_a_key_apply_across_all_workers(gateway, connect, key):
    own = key("--concurrent", "1", "--requests-per-minute", "3")
    [(_, one), (_, two)] = connect(own)
    stream = one.ask("POST", CHAT, LONG)
    assert stream.status == 200
    status, refused = two.read("POST", CHAT, SHORT)
    assert (status, json.loads(refused)["error"]["code"]) == (429, "concurrent_requests")
    stream.close()
    one.close()

    def code():
        answer = json.loads(two.read("POST", CHAT, SHORT)[1])
        return answer["error"]["code"] if "error" in answer else ""

    until(lambda: code() == "requests_per_minute", why="the place is free again, and the minute's requests are used")
    two.key = "sk-wrong"
    assert [two.read("POST", path, SHORT)[0] for path in (CHAT, "/v1/files")] == [401, 401]


@pytest.mark.slow
def test_killed_worker_breaks_only_its_own_streams(gateway, connect, key):
    own = key("--concurrent", "2")
    [(pid, one), (_, two)] = connect(own)
    assert one.read("POST", CHAT, SHORT)[0] == 200
    before, counted = workers_in(two)["restarts"], metric(two, "stoker_gateway_requests_total")
    broken, whole = one.ask("POST", CHAT, LONG), two.ask("POST", CHAT, MEDIUM)
    assert broken.readline()
    assert whole.readline()
    psutil.Process(pid).kill()
    lines = []
    with suppress(http.client.HTTPException, ConnectionError):
        lines += iter(broken.readline, b"")
    assert b"data: [DONE]\n" not in lines
    assert whole.read().endswith(b"data: [DONE]\n\n")
    until(lambda: workers_in(two) == {"wanted": NUMBER, "running": NUMBER, "restarts": before + 1}, why="its successor")
    until(lambda: metric(two, "stoker_gateway_requests_total") == counted + 1, why="the count of the dead one is kept")
    until(lambda: "a worker of the gateway ended with -9" in "".join(gateway.said), why="the log has the death")
    until(lambda: f"by {NUMBER} workers, {before + 1} restart" in row_of_status(gateway), why="the gateway's note")
    [(_, one), (_, two)] = connect(own)
    streams = [connection.ask("POST", CHAT, LONG) for connection in (one, two)]  # the key's limit has lost no place
    assert [stream.status for stream in streams] == [200, 200]


@pytest.mark.slow
def test_workers_end_with_a_killed_gateway(gateway, connect):
    connect()
    found, url = workers_of(gateway), gateway.url
    assert len(found) == NUMBER
    gateway.kill()
    until(lambda: not any(map(is_running, found)), why="the workers end")
    gateway.start("--workers", str(NUMBER))
    assert gateway.url == url
    [(_, one), _] = connect()
    assert one.read("POST", CHAT, SHORT)[0] == 200


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_a_gateway_that_is_stopped(gateway, connect, number):
    [(_, one), _] = connect()
    found = workers_of(gateway)
    assert one.ask("POST", CHAT, LONG).readline()  # one worker has an open stream
    found[0].suspend()  # a suspended worker cannot stop by itself
    os.kill(gateway.pid, number)
    until(lambda: gateway.has_ended, why="the end of the gateway")
    assert not any(map(is_running, found))
    gateway.start("--workers", str(NUMBER))


@pytest.mark.slow
@pytest.mark.long
def test_hung_worker_does_not_delay_metrics_of_other_workers(gateway, connect):
    [(pid, _), (_, two)] = connect()
    psutil.Process(pid).suspend()
    try:
        assert two.read("POST", CHAT, SHORT)[0] == 200
        assert metric(two, "stoker_gateway_requests_total") >= 1
        assert len(json.loads(two.found("/v1/models"))["data"]) > 1
    finally:
        psutil.Process(pid).resume()


def is_running(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


# ---- parts


@in_loop
async def test_failing_workers_restart_after_growing_pauses(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(workers_module.sys, "executable", "/bin/false")
    monkeypatch.setattr(workers_module, "_PAUSE_S", 0.01)
    monkeypatch.setattr(workers_module, "_LONGEST_PAUSE_S", 0.04)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = WorkerTask(
            parent=os.getpid(), listener=listener.fileno(), session="", settings={}, most_bytes=1, origins=(),
            tls=None,
        )  # fmt: skip
        workers = GatewayWorkers(task, number=1, models={}, guard=KeyGuard(KeyFile(tmp_path / "keys.json")))
        keeping = asyncio.create_task(workers.keep_workers_running(None))
        while workers.worker_facts.restarts < 4:
            await asyncio.sleep(0.01)
        assert workers.worker_facts.running == 0
        await workers.stop_workers()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    pauses = [record.args[1] for record in caplog.records if "ended with" in record.message]
    assert pauses[:4] == [0.01, 0.02, 0.04, 0.04]


@in_loop
async def test_calls_between_processes_return_raise_or_are_cancelled():
    here, there = socket.socketpair()
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def do(name, given):
        if name == "double":
            return [2 * each for each in given]
        if name == "fail":
            raise ValueError("no such model")
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    one = GatewayPeer(*await asyncio.open_unix_connection(sock=here), do)
    two = GatewayPeer(*await asyncio.open_unix_connection(sock=there), do)
    running = [asyncio.create_task(each.process_frames()) for each in (one, two)]
    assert await asyncio.gather(one.call_peer("double", 2, b"ab"), two.call_peer("double", "c")) == [
        [4, b"abab"],
        ["cc"],
    ]
    with pytest.raises(ConnectionError, match="no such model"):
        await one.call_peer("fail")
    waiting = asyncio.create_task(one.call_peer("wait"))
    await begun.wait()
    waiting.cancel()
    await cancelled.wait()
    waiting = asyncio.create_task(one.call_peer("wait"))
    await asyncio.sleep(0)
    running[1].cancel()
    with pytest.raises(ConnectionError, match="the other process has ended"):
        await waiting
    with pytest.raises(ConnectionError, match="the other process has ended"):
        await one.call_peer("double", 1)
    await asyncio.gather(*running, return_exceptions=True)
