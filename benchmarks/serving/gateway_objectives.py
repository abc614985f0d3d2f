"""Three models on two CPU devices behind the gateway: objectives met under `slinfer` and under `default`.

Each seed measures, with the same models and devices, one gateway after the other:

1. Under `default` and without objectives: times of single requests, and the capacity, which is the rate of 48 clients
   that each send the next request at once, after a rehearsal. The objectives are `TTFT_IDLE` and `TPOT_IDLE` times the
   single requests' medians. Requests arrive as a Poisson process at 80 % of the capacity; other requests at this rate
   complete the step times.
2. The same requests under `slinfer` and under `default`, in turn first, after a rehearsal with the clients of 1. Token
   n is due TTFT + n * TPOT after the request (SLINFER eq. 1), as the policy decides. A request with a late token, and
   one that was refused or failed, has not met its objectives.
3. The same rehearsal and requests in the simulator, with the steps and delays that 1 measured (`measured_delays`).
4. Requests that `slinfer` refused, each replayed among the requests that it accepted shortly before and after, under
   `slinfer` that must accept this request (`slinfer_policies.forcing`); and as many accepted requests, for comparison.
5. The same in the simulator, where each step takes the time that the forecast assumes.

Each device computes for `DEVICE_SHARE` of the time (`device_shares`), because gateway, manager, pilot and clients run
on the same cores. Without this limit, a measurement judges the machine.

    python -m benchmarks.side benchmarks.serving.gateway_objectives side seed=1
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import sqlite3
import statistics
import string
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from tiny_model import write_tiny_model

from benchmarks.harness import ROOT, need, run_side
from benchmarks.serving import slinfer_policies
from benchmarks.serving.gateways import request_bytes, served
from benchmarks.serving.simulated_models import DEVICES, LAYERS, Delayed, simulated_lateness
from benchmarks.starting import keep_state_in
from benchmarks.tables import Bar, Line, Table
from stoker.contexts import state_folder
from stoker.contexts.performance import READ_STEPS_QUERY, step_times_from_rows
from stoker.contexts.step_times import StepTable, StepTimes
from stoker.manager.core.seams import Policies
from stoker.manager.policies import find_shipped_policy
from stoker.manager.policies.slinfer import validation
from stoker.manager.sim.client import Arrival
from stoker.pilot.core import turns
from stoker.protocol.calls import Objective

SEEDS, FOR_S, SHARE = (54, 55, 56), 60.0, 0.8
"""Seeds 1 to 53 were used while the settings changed. FINDINGS.md has the results of 57 and 58."""
MODELS, CLIENTS, CLIENTS_S = 3, 16, 20.0
SINGLE = 10
"""Single requests of each model, one after the other."""
TTFT_IDLE, TPOT_IDLE = 10.0, 4.0
PROMPT, OUTPUT = (20, 200), (10, 80)
"""Shortest and longest prompt and answer, in tokens; a token is a letter."""
REPLAYED = 8
"""Most refused requests that a seed replays, and most accepted ones."""
REPLAYED_SIMULATED, MARGINS = 60, (1.1, 1.0)
"""Most refused requests that are replayed in the simulator, with each factor on step times in the validation."""
BEFORE_S = 10.0
"""Accepted requests of these seconds before a refused one are replayed with it. The simulator replays all of them."""
LIMITED_DEVICES, DEVICE_SHARE = ROOT / "benchmarks" / "serving" / "device_shares", 0.4
FORCING = f"{slinfer_policies.__file__}:forcing"
MEMORY_BYTES = 1_000_000_000
MODEL = '[models.model-{number}]\npath = "models/{number}"\nmemory = "1 GB"\nmin = 1\n{objectives}'


class Request(msgspec.Struct, frozen=True):
    at_s: float
    model: int
    prompt: str
    output: int
    forced: bool = False
    """True if `slinfer` must accept the request (`slinfer_policies.forcing`)."""


class Outcome(msgspec.Struct):
    """Seconds of one request; `status` 0: the connection failed."""

    status: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: int = 0
    at_s: list[float] = []
    """When each token came, after the request; tokens of one event come together."""

    def met(self, wanted: Objective, request: Request) -> bool:
        whole = self.status == 200 and self.tokens >= request.output
        return whole and all(at <= wanted.ttft_s + n * wanted.tpot_s for n, at in enumerate(self.at_s))


class Rehearsal(msgspec.Struct, frozen=True):
    """Requests of clients that send the next request at once, with their times; `rate`: ended requests per second."""

    requests: tuple[Request, ...] = ()
    rate: float = 0.0
    took_s: float = 0.0


NO_REHEARSAL = Rehearsal()


def requests_at(rate: float, *, seed: int, for_s: float) -> list[Request]:
    """Return requests at `rate` per second. The seed alone decides lengths, texts and models."""
    chance, at_s, found = random.Random(f"gateway-objectives/{seed}"), 0.0, list[Request]()
    while True:
        at_s += chance.expovariate(1.0) / rate
        request = request_of(chance, at_s=at_s)
        if at_s >= for_s:
            return found
        found.append(request)


def request_of(chance: random.Random, *, at_s: float = 0.0, model: int | None = None) -> Request:
    text = "".join(chance.choices(string.ascii_lowercase, k=chance.randint(*PROMPT)))
    number = chance.randrange(MODELS)
    return Request(at_s, number if model is None else model, text, chance.randint(*OUTPUT))


def requests_to_replay(
    requests: Sequence[Request], accepted: Sequence[bool], at: int, wanted: Objective, *, before_s: float = BEFORE_S
) -> tuple[list[int], list[Request]]:
    """Return the numbers of a request and of those accepted shortly before and after it, and these requests with times
    from the first one.
    """
    middle, after_s = requests[at].at_s, wanted.ttft_s + wanted.tpot_s * requests[at].output
    near = (middle - before_s <= request.at_s <= middle + after_s for request in requests)
    some = [n for n, (kept, is_near) in enumerate(zip(accepted, near, strict=True)) if n == at or (kept and is_near)]
    start = requests[some[0]].at_s
    return some, [msgspec.structs.replace(requests[n], at_s=requests[n].at_s - start, forced=n == at) for n in some]


# ---- a gateway


@contextmanager
def gateway(folder: Path, policy: str, wanted: Objective | None) -> Iterator[int]:
    """Start a gateway and its session; yield its port once all models are loaded."""
    objectives = ""
    if wanted is not None:
        objectives = f'ttft = "{1000 * wanted.ttft_s:.1f} ms"\ntpot = "{1000 * wanted.tpot_s:.1f} ms"\n'
    models = "\n".join(MODEL.format(number=number, objectives=objectives) for number in range(MODELS))
    with served(folder, models, devices=DEVICES, policy=policy) as port:
        for number in range(MODELS):
            warm = asyncio.run(ask(port, request_of(random.Random(0), model=number), prefer="wait=600"))
            if warm.status != 200:
                raise RuntimeError(f"model {number}: status {warm.status}")
        yield port


async def ask(port: int, request: Request, *, prefer: str = "", ttft_ms: int = 0) -> Outcome:
    """Send one streamed request; return its times. `ttft_ms`: objective of the model, even."""
    found, begun = Outcome(), time.monotonic()
    asked = {
        "model": f"model-{request.model}", "prompt": request.prompt, "max_tokens": request.output, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        headers = {"Prefer": prefer} if prefer else {}
        if request.forced:
            headers["stoker-ttft"] = f"{ttft_ms + 1} ms"
        writer.write(request_bytes("/v1/completions", asked, headers=headers))
        found.status = int((await reader.readline()).split()[1])
        first_at = last_at = 0.0
        while found.status == 200 and (line := await reader.readline()):
            if line.startswith(b"data: [DONE]"):
                break
            if not line.startswith(b"data: {"):
                continue
            tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", 0)
            if tokens > found.tokens:
                last_at = time.monotonic()
                found.at_s += [last_at - begun] * (tokens - found.tokens)
                found.tokens, first_at = tokens, first_at or last_at
        found.ttft_s = first_at - begun if first_at else 0.0
        found.tpot_s = (last_at - first_at) / (found.tokens - 1) if found.tokens > 1 else 0.0
    finally:
        writer.close()
    return found


async def clients(port: int, *, for_s: float) -> Rehearsal:
    """Send requests of 48 clients without a pause; return the requests and their rate."""
    begun, ended, sent = time.monotonic(), 0, list[Request]()

    async def one(number: int) -> None:
        nonlocal ended
        chance = random.Random(f"client/{number}")
        while (at_s := time.monotonic() - begun) < for_s:
            sent.append(request_of(chance, at_s=at_s, model=number % MODELS))
            await ask(port, sent[-1], prefer="wait=600")
            ended += time.monotonic() < begun + for_s

    await asyncio.gather(*(one(number) for number in range(MODELS * CLIENTS)))
    return Rehearsal(tuple(sent), ended / for_s, time.monotonic() - begun)


async def single_requests(port: int) -> list[Outcome]:
    chance = random.Random("single")
    return [await ask(port, request_of(chance, model=number % MODELS)) for number in range(MODELS * SINGLE)]


async def send(port: int, requests: Sequence[Request], wanted: Objective) -> list[Outcome]:
    """Send requests at their times; return what came of each."""
    begun = time.monotonic() + 0.5

    async def one(request: Request) -> Outcome:
        await asyncio.sleep(max(0.0, begun + request.at_s - time.monotonic()))
        return await ask(port, request, ttft_ms=round(1000 * wanted.ttft_s))

    return await asyncio.gather(*map(one, requests))


def refused_offers(port: int) -> Counter[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as answer:
        return offers_in(answer.read().decode())


def offers_in(metrics: str) -> Counter[str]:
    """Return how many offers the session's pilots have refused, by case."""
    found = Counter[str]()
    for case, count in re.findall(r'^stoker_refused_offers_total{case="([^"]*)".*} (\S+)$', metrics, re.MULTILINE):
        found[case] += int(float(count))
    return found


# ---- the simulator


def measured_delays(file: Path, *, ttft_s: float, prompt: int) -> Delayed:
    """Read a session's measurements. `ttft_s`: time to the first token of a single request with `prompt` tokens.

    A request has two messages on its way to its library, so the delay of a message, with the gateway's part, is half
    of what the first token takes beyond its prefill.
    """
    times = StepTimes()
    with sqlite3.connect(file, timeout=30.0) as store:
        for (recipe,) in store.execute("SELECT DISTINCT recipe FROM steps").fetchall():
            for each in step_times_from_rows(store.execute(READ_STEPS_QUERY, (recipe,)).fetchall()).values():
                times = times.joined_with(each)
        [(load_s,)] = store.execute("SELECT avg(mean) FROM measured WHERE what = 'load_s'").fetchall()
    prefill_s = StepTable(times.prefill).estimate_seconds(prompt, prompt / 2)
    return Delayed(times, float(load_s), max(0.0, (ttft_s - prefill_s) / 2))


def simulated(
    requests: Sequence[Request], policies: Policies, delayed: Delayed, objective: Objective, *,
    rehearsal: Rehearsal = NO_REHEARSAL,
) -> list[float]:  # fmt: skip
    """Return by how many seconds the latest token of each request is late (`simulated_lateness`), after the same
    rehearsal as live.
    """
    moved = [msgspec.structs.replace(each, at_s=each.at_s + rehearsal.took_s) for each in requests]
    asked = [
        Arrival(
            each.at_s, f"model-{each.model}", input_length=len(each.prompt), output=each.output,
            most_output=each.output,
            objective=msgspec.structs.replace(objective, ttft_s=objective.ttft_s + 0.001 * each.forced),
        )
        for each in (*rehearsal.requests, *moved)
    ]  # fmt: skip
    return simulated_lateness(
        asked, delayed, policies, models=MODELS, memory_bytes=MEMORY_BYTES, rehearsed=len(rehearsal.requests)
    )


def simulated_replays(
    requests: Sequence[Request], delayed: Delayed, objective: Objective, margin: float, *,
    rehearsal: Rehearsal = NO_REHEARSAL,
) -> dict[str, float]:  # fmt: skip
    """Refuse and replay requests in the simulator, where each step takes the time that the forecast assumes.

    Only `margin`, the factor on step times in the shadow validation, then makes a forecast wrong.
    """
    with patch.object(turns, "STEP_TIME_MARGIN", margin), patch.object(validation, "STEP_TIME_MARGIN", margin):
        late = simulated(requests, find_shipped_policy("slinfer").make(), delayed, objective, rehearsal=rehearsal)
    accepted = [each < math.inf for each in late]
    refused = [number for number, is_accepted in enumerate(accepted) if not is_accepted]
    found: dict[str, float] = {"met": share_met(late), "late": 0, "harm": 0, "of": 0}
    for at in random.Random(f"margins/{margin}").sample(refused, min(REPLAYED_SIMULATED, len(refused))):
        some, moved = requests_to_replay(requests, accepted, at, objective, before_s=math.inf)
        forced = simulated(moved, slinfer_policies.forcing(), delayed, objective, rehearsal=rehearsal)
        again = dict(zip(some, forced, strict=True))
        found["of"] += 1
        found["late"] += 0 < again[at] < math.inf
        found["harm"] += again[at] <= 0 and any(again[n] > 0 >= late[n] for n in some if n != at)
    return found


def share_met(late: Sequence[float]) -> float:
    return 100 * sum(each <= 0 for each in late) / max(1, len(late))


# ---- one seed


def measured(folder: Path, *, seed: int, for_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"seed": seed, "load": [os.getloadavg()[0]]}
    with gateway(folder, "default", None) as port:
        alone = asyncio.run(single_requests(port))
        asyncio.run(clients(port, for_s=CLIENTS_S))
        found["capacity"] = asyncio.run(clients(port, for_s=CLIENTS_S)).rate
        rate = SHARE * found["capacity"]
        asyncio.run(send(port, requests_at(rate, seed=-seed, for_s=CLIENTS_S), Objective()))
    ttft_s, tpot_s = (statistics.median(getattr(each, name) for each in alone) for name in ("ttft_s", "tpot_s"))
    wanted = Objective(ttft_s=2 * round(500 * TTFT_IDLE * ttft_s) / 1000, tpot_s=TPOT_IDLE * tpot_s)
    delayed = measured_delays(state_folder() / "performance.sqlite", ttft_s=ttft_s, prompt=sum(PROMPT) // 2)
    requests = requests_at(rate, seed=seed, for_s=for_s)
    found |= {"ttft_s": wanted.ttft_s, "tpot_s": wanted.tpot_s, "requests": len(requests)}
    outcomes: dict[str, list[Outcome]] = {}
    rehearsals: dict[str, Rehearsal] = {}
    for policy in ("slinfer", "default") if seed % 2 else ("default", "slinfer"):
        with gateway(folder, policy, wanted) as port:
            rehearsal = rehearsals[policy] = asyncio.run(clients(port, for_s=CLIENTS_S))
            found["load"].append(os.getloadavg()[0])
            before = refused_offers(port)
            outcomes[policy] = asyncio.run(send(port, requests, wanted))
            cases = refused_offers(port) - before
        late = simulated(requests, find_shipped_policy(policy).make(), delayed, wanted, rehearsal=rehearsal)
        found[policy] = {"rehearsed": rehearsal.rate, "offers": cases, "simulated": share_met(late)}
        found[policy] |= figures(requests, outcomes[policy], wanted)
    found["delays"] = {"message_s": delayed.message_s, "load_s": delayed.load_s}
    found["replays"] = replay_requests(folder, requests, outcomes["slinfer"], wanted, seed=seed)
    found["margins"] = {
        f"{margin:g}": simulated_replays(requests, delayed, wanted, margin, rehearsal=rehearsals["slinfer"])
        for margin in MARGINS
    }
    found["load"].append(os.getloadavg()[0])
    return found


def figures(requests: Sequence[Request], outcomes: Sequence[Outcome], wanted: Objective) -> dict[str, Any]:
    met = [each.met(wanted, request) for request, each in zip(requests, outcomes, strict=True)]
    answered = [each for each in outcomes if each.status == 200 and each.tokens]
    return {
        "met": 100 * sum(met) / max(1, len(met)),
        "statuses": {str(status): count for status, count in Counter(each.status for each in outcomes).items()},
        "ttft_p50_s": statistics.median([each.ttft_s for each in answered] or [0.0]),
        "tpot_p50_s": statistics.median([each.tpot_s for each in answered] or [0.0]),
    }


def replay_requests(
    folder: Path, requests: Sequence[Request], outcomes: Sequence[Outcome], wanted: Objective, *, seed: int
) -> dict[str, Any]:
    """Replay refused and accepted requests. `late`: it missed an objective; `harm`: only an accepted one did that had
    met its objectives before.
    """
    met = [each.met(wanted, request) for request, each in zip(requests, outcomes, strict=True)]
    accepted = [each.status == 200 for each in outcomes]
    chance = random.Random(f"replays/{seed}")
    refused = [number for number, each in enumerate(outcomes) if each.status == 503]
    kept = [number for number, is_met in enumerate(met) if is_met]
    found: dict[str, Any] = {name: {"late": 0, "harm": 0, "of": 0} for name in ("refused", "accepted")}
    if not refused:
        return found
    with gateway(folder, FORCING, wanted) as port:
        asyncio.run(clients(port, for_s=CLIENTS_S))
        for name, numbers in (("refused", refused), ("accepted", kept)):
            for at in chance.sample(numbers, min(REPLAYED, len(numbers))):
                some, moved = requests_to_replay(requests, accepted, at, wanted)
                again = asyncio.run(send(port, moved, wanted))
                late = {n for n, each in zip(some, again, strict=True) if not each.met(wanted, requests[n])}
                found[name]["of"] += 1
                found[name]["late"] += at in late and again[some.index(at)].status == 200
                found[name]["harm"] += at not in late and any(met[n] for n in late)
    return found


# ---- the table


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need("torch", "transformers", "tokenizers", "safetensors", "starlette", "pytest")
    runs = []
    for seed in SEEDS[:1] if quick else SEEDS:
        runs.append(run_side(side, seed=seed, for_s=10.0 if quick else FOR_S, timeout_s=1800.0))
        say(run_summary(runs[-1]))
    return table_of(runs)


def run_summary(run: dict[str, Any]) -> str:
    sides = "; ".join(
        f"{name}: {run[name]['met']:.1f} % met, statuses {run[name]['statuses']}, refused offers"
        f" {dict(run[name]['offers'])}, medians ttft"
        f" {run[name]['ttft_p50_s']:.3f} s, tpot {1000 * run[name]['tpot_p50_s']:.1f} ms, {MODELS * CLIENTS} clients"
        f" {run[name]['rehearsed']:.1f}/s, simulated {run[name]['simulated']:.1f} % met"
        for name in ("slinfer", "default")
    )
    replays = ", ".join(
        f"{name} {each['late']} late and {each['harm']} at the cost of another, of {each['of']}"
        for name, each in run["replays"].items()
    )
    margins = ", ".join(
        f"margin {margin}: {each['met']:.1f} % met, {each['late']} late and {each['harm']} at the cost of another, of"
        f" {each['of']}"
        for margin, each in run["margins"].items()
    )
    return (
        f"seed {run['seed']}: {run['requests']} requests at {SHARE:.0%} of {run['capacity']:.1f}/s, objectives"
        f" {run['ttft_s']:.3f} s and {1000 * run['tpot_s']:.1f} ms; {sides}; simulated with"
        f" messages of {1000 * run['delays']['message_s']:.1f} ms and loads of {run['delays']['load_s']:.1f} s;"
        f" replayed: {replays}; replayed in the simulator: {margins}; load"
        f" {', '.join(f'{each:.1f}' for each in run['load'])}"
    )


def table_of(runs: list[dict[str, Any]]) -> Table:
    ours, theirs = ([run[name]["met"] for run in runs] for name in ("slinfer", "default"))
    refused = [run["replays"]["refused"] for run in runs if run["replays"]["refused"]["of"]]
    late = [100 * each["late"] / each["of"] for each in refused] or [float("nan")]
    with_harm = [100 * (each["late"] + each["harm"]) / each["of"] for each in refused] or [float("nan")]
    simulated = [run["slinfer"]["simulated"] for run in runs]
    apart = [abs(a - b) for a, b in zip(ours, simulated, strict=True)]
    more = [a - b for a, b in zip(ours, theirs, strict=True)]
    lines = [
        Line(what="objectives met, %", cells={"default": theirs, "slinfer": ours, "more, points": more}, digits=1),
        Line(
            what="least of all seeds, points", cells={"more": [min(more)] * len(more)},
            bar=Bar(at_least=0.1), digits=1,
        ),
        Line(
            what="slinfer, simulated with delays measured beforehand",
            cells={"met, %": simulated, "apart, most of all seeds": [max(apart)] * len(apart)},
            bar=Bar(at_most=5.0), digits=1,
        ),
        Line(what="refused requests that are late or make another late, %", cells={"replayed": with_harm}, digits=1),
        Line(
            what="refused requests that are late themselves, %", cells={"replayed": late},
            bar=Bar(at_least=90.0), digits=1,
        ),
    ]  # fmt: skip
    return Table(lines=lines, notes=[run_summary(run) for run in runs])


def side(seed: int = 1, for_s: float = FOR_S) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="objectives-") as place:
        folder = Path(place)
        keep_state_in(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(LIMITED_DEVICES), os.environ.get("PYTHONPATH", "")])
        os.environ["DEVICE_SHARE"] = str(DEVICE_SHARE)
        (folder / "models").mkdir()
        for number in range(MODELS):
            write_tiny_model(folder / "models" / str(number), seed=number, layers=LAYERS, ends=False, ascii_only=True)
        return measured(folder, seed=seed, for_s=for_s)
