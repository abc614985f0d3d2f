from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli.command_line import Stoker
from free_port import free_port
from gateway.browser import with_browser
from gateway.metrics_queried import has_metric, metrics_queried
from gateway.running import LIMIT_S, SERVE, stoker, until

if not all(map(find_spec, ("httpx", "starlette", "uvicorn", "prometheus_client"))):
    pytest.skip("needs the extras serve and test", allow_module_level=True)

import httpx

pytestmark = pytest.mark.slow
PROGRAM = """
import time
import stoker

@stoker.context
def table(name):
    return {"yes": 1}

@stoker.app(context=table("words"))
def judge(labels, number):
    time.sleep(0.05)
    return labels["yes" if number % 10 else "MAYBE"]

with stoker.load("site.toml"):
    for _ in stoker.map(judge, range(100_000), return_exceptions=True):
        pass
"""
SITE = '[provider]\nkind = "local"\n[pilot]\ndevices = "cpu:1"\nmax_blocks = 1\n'
EVENTS = {"Accept": "text/event-stream"}


class RunningDashboard:
    def __init__(self, folder: Path, *options: str) -> None:
        command = [*SERVE, "dashboard", *options, "--json"]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.facts: dict = {}

    def start(self) -> RunningDashboard:
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            assert line, self.process.communicate(timeout=LIMIT_S)
            text += line
        self.facts = json.loads(text)
        return self

    @property
    def url(self) -> str:
        return self.facts["page"].rstrip("/")

    def figures(self) -> dict:
        return httpx.get(f"{self.url}/status", timeout=LIMIT_S).json()

    def events(self, count: int) -> list[tuple[str, dict]]:
        found = []
        with httpx.stream("GET", f"{self.url}/status", headers=EVENTS, timeout=LIMIT_S) as answer:
            kind = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                if line.startswith("data: "):
                    found.append((kind, json.loads(line.removeprefix("data: "))))
                    kind = ""
                if len(found) == count:
                    break
        return found

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def program(world):
    (world.path / "site.toml").write_text(SITE)
    program = world.start(PROGRAM)
    yield program
    program.send_signal(signal.SIGTERM)
    program.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def dashboard(world, program):
    until(lambda: list(world.runs.glob("*/*/session.json")), why="the session of the program")
    running = RunningDashboard(world.path, "--port", str(free_port())).start()
    yield running
    running.stop()


def test_events_show_maps_failures_and_slow_calls(dashboard):
    now = until(
        lambda: (found := dashboard.figures())["maps"] and found["failures"] and found["slowest"] and found,
        why="a map with failures",
    )
    [map] = now["maps"]
    assert (map["function"], map["total"]) == ("judge", 100_000)
    [group] = now["failures"]
    assert (group["function"], group["error"]) == ("judge", "KeyError")
    assert re.fullmatch(r".*program.py:\d+ in judge", group["place"])
    assert now["contexts"][0]["name"].startswith("table-")
    assert now["pilots"][0]["devices"][0]["device"] == "cpu:0"
    assert now["slowest"][0]["run_s"] >= now["slowest"][-1]["run_s"] >= 0.05
    assert "KeyError" in stoker("explain", group["example"], now["session"])
    assert Path(now["log"]).is_file()


def test_session_has_the_metrics_that_grafana_queries(dashboard):
    until(lambda: dashboard.figures()["failures"], why="a failure")
    text = httpx.get(f"{dashboard.url}/metrics", timeout=LIMIT_S).text
    for name in ("num_requests_running", "num_requests_waiting", "libraries", "run_seconds_total"):
        assert re.search(rf'^stoker_{name}{{model_name="table-\w+"', text, re.MULTILINE), name
    assert re.search(r'^stoker_calls_total{finished_reason="failed"} [1-9]', text, re.MULTILINE)
    assert "stoker_session_up 1.0" in text
    queried = metrics_queried(httpx.get(f"{dashboard.url}/grafana.json", timeout=LIMIT_S).json(), row="Session")
    assert len(queried) > 15
    assert [name for name in queried if not has_metric(text, name)] == []


def test_clients_that_do_not_read_cost_no_memory_or_delay(dashboard):
    port = int(dashboard.url.rpartition(":")[2])
    asleep = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    try:
        for each in asleep:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")
        before = memory_bytes(dashboard.process.pid)
        (_, first), (kind, history), *_, (_, last) = dashboard.events(6)
        assert memory_bytes(dashboard.process.pid) - before < 20e6
    finally:
        for each in asleep:
            each.close()
    assert kind == "history"
    for each in history.values():
        assert all(len(series) == len(each["at"]) for series in each["series"].values())
        assert {"rate", "waiting", "running", "memory"} <= set(each["series"])
    assert last["maps"][0]["done"] > first["maps"][0]["done"]


def memory_bytes(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


@with_browser
def test_browser_page_shows_progress_and_failures_without_reload(dashboard, page):
    page.open(dashboard.url, width=1400, height=900)
    first = until(lambda: page.text("#maps tr"), why="the map")
    assert "100,000" in first
    until(lambda: page.text("#maps tr") != first, why="progress, without another load of the page")
    until(lambda: "KeyError at" in page.text("#failures"), why="the group of failures")
    assert re.search(r"stoker explain c-\d+ \w+", page.text("#failures"))
    assert page.value("document.querySelector('#chart-rate .curve').getAttribute('d')").startswith("M")
    page.resize(width=390)
    until(lambda: page.value("document.documentElement.scrollWidth <= innerWidth"), why="it fits a phone")
    assert page.errors == []


def test_dashboard_error_names_a_taken_port_or_unknown_session(dashboard, world, monkeypatch):
    port = dashboard.url.rpartition(":")[2]
    monkeypatch.chdir(world.path)
    for options, said in (
        (("--port", port), f"port {port} of 127.0.0.1 is in use"),
        (("zzzz9",), "no session"),
        (("--host", "0.0.0.0"), "keys add NAME"),
    ):
        assert said in str(Stoker()("dashboard", *options).exception)


@pytest.mark.long
def test_ended_session_shows_its_last_state(world, tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    program = world.start(PROGRAM, folder=tmp_path)
    until(lambda: list(tmp_path.glob("runinfo/*/*/session.json")), why="the session of the program")
    dashboard = RunningDashboard(tmp_path, "--port", str(free_port())).start()
    try:
        until(lambda: dashboard.figures()["failures"], why="a failure")
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=LIMIT_S)
        last = until(lambda: (found := dashboard.figures())["over"] and found, why="the page says that it is over")
        assert last["calls"]["done"] > 0
        assert last["failures"][0]["error"] == "KeyError"
        assert "stoker_session_up 0.0" in httpx.get(f"{dashboard.url}/metrics", timeout=LIMIT_S).text
    finally:
        dashboard.stop()
    path = str(tmp_path / "s")
    later = RunningDashboard(tmp_path, "--uds", path).start()
    try:
        assert "its client is gone" in later.facts["over"]
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=LIMIT_S) as over:
            assert over.get("http://stoker/status").json()["calls"]["done"] == last["calls"]["done"]
    finally:
        later.stop()
