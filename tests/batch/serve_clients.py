"""Run clients of a gateway under faults: requests, correct answers, excused errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

READ_S = 240.0
"""Seconds of silence after which a request fails. (Streams have comments every 15 s.)"""
LENGTHS = (8, 24, 64, 300)
PROMPTS = (
    "What is two plus two?",
    "Name a river.",
    "Tell me a story of a lighthouse and its keeper.",
    "List ten birds.",
)


@dataclass(frozen=True)
class Question:
    """A greedy request with one correct answer."""

    prompt: str
    tokens: int

    def body(self, *, stream: bool) -> dict[str, Any]:
        body = {"model": "small", "max_tokens": self.tokens, "temperature": 0, "stream": stream}
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return {**body, **usage, "messages": [{"role": "user", "content": self.prompt}]}


QUESTIONS = tuple(Question(*each) for each in itertools.product(PROMPTS, LENGTHS))


@dataclass
class Answer:
    """An incomplete or complete answer. `pieces`: chunks with text; `tokens`: the gateway's token count."""

    text: str = ""
    pieces: int = 0
    tokens: int = 0
    finish: str = ""
    first_s: float = 0.0
    silence_s: float = 0.0


@dataclass
class Outage:
    """No gateway listens from `killed_at` to `back_at` (monotonic seconds)."""

    killed_at: float
    back_at: float = float("inf")


class BadAnswer(Exception):
    """A wrong answer; the message says why."""


@dataclass
class Tally:
    ended: Counter[str] = field(default_factory=Counter)
    failed: list[dict[str, Any]] = field(default_factory=list)
    cut: Counter[str] = field(default_factory=Counter)
    never_accepted: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    silence_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        counts = {kind: dict(getattr(self, kind)) for kind in ("ended", "cut", "never_accepted")}
        times = {name: percentiles(getattr(self, name)) for name in ("first_s", "silence_s", "plain_s")}
        return {**counts, **times, "failed": self.failed}


def percentiles(numbers: list[float]) -> dict[str, float]:
    found = sorted(numbers)
    places = {"p50": len(found) // 2, "p99": len(found) * 99 // 100, "most": len(found) - 1}
    return {name: round(found[place], 3) for name, place in places.items()} if found else {}


async def receive(client: httpx.AsyncClient, question: Question, answer: Answer, *, stream: bool) -> None:
    """Send a question and fill `answer`. Raises BadAnswer and httpx.TransportError."""
    last = begun = time.monotonic()
    async with client.stream("POST", "/v1/chat/completions", json=question.body(stream=stream)) as response:
        if response.status_code != 200:
            raise BadAnswer(f"status {response.status_code}: {(await response.aread()).decode()[:500]}")
        if not stream:
            body = json.loads(await response.aread())
            [choice] = body["choices"]
            answer.text, answer.finish = choice["message"]["content"], choice["finish_reason"]
            answer.pieces = answer.tokens = body["usage"]["completion_tokens"]
            return
        done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                now = time.monotonic()
                _take(json.loads(line.removeprefix("data: ")), answer)
                if answer.pieces:
                    answer.first_s = answer.first_s or now - begun
                    answer.silence_s = max(answer.silence_s, now - last)
                last = now
        if not done:
            raise BadAnswer("the stream ended without [DONE]")


def _take(chunk: dict[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        raise BadAnswer(f"error event: {json.dumps(chunk['error'])[:500]}")
    for choice in chunk["choices"]:
        delta = choice["delta"]
        if "role" not in delta and "content" in delta:
            answer.pieces += 1
            answer.text += delta["content"]
        answer.finish = choice["finish_reason"] or answer.finish
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]


class Clients:
    """Clients that send requests with pauses of up to `pause_s`; half of the requests are streams."""

    def __init__(self, url: str, *, clients: int, seed: int, pause_s: float = 0.5) -> None:
        self.url = url
        self.tally = Tally()
        self.outages: list[Outage] = []
        self.right: dict[Question, str] = {}
        self._clients = clients
        self._seed = seed
        self._pause_s = pause_s
        self._begun = time.monotonic()

    async def learn(self) -> None:
        async with self._client() as client:
            for question in QUESTIONS:
                answer = Answer()
                await receive(client, question, answer, stream=False)
                self.right[question] = answer.text

    async def ask_until(self, over: asyncio.Event) -> None:
        self._begun = time.monotonic()
        await asyncio.gather(*(self._ask_on(number, over) for number in range(self._clients)))

    async def _ask_on(self, number: int, over: asyncio.Event) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        async with self._client() as client:
            while not over.is_set():
                await self._request(client, chance.choice(QUESTIONS), stream=number % 2 == 0)
                await asyncio.sleep(chance.uniform(0.1 * self._pause_s, self._pause_s))

    async def _request(self, client: httpx.AsyncClient, question: Question, *, stream: bool) -> None:
        kind = "stream" if stream else "plain"
        while True:
            begun, answer = time.monotonic(), Answer()
            try:
                await receive(client, question, answer, stream=stream)
                self._judge(question, answer)
            except (httpx.TransportError, BadAnswer, ValueError, KeyError) as error:
                outage = self._outage(error, begun)
                if outage is not None and self.right[question].startswith(answer.text):
                    (self.tally.cut if begun < outage.killed_at else self.tally.never_accepted)[kind] += 1
                    await asyncio.sleep(0.2)
                    continue
                self._fail(kind, question, answer, f"{type(error).__name__}: {error}", begun=begun)
                return
            self.tally.ended[kind] += 1
            if stream:
                self.tally.first_s.append(answer.first_s)
                self.tally.silence_s.append(answer.silence_s)
            else:
                self.tally.plain_s.append(time.monotonic() - begun)
            return

    def _judge(self, question: Question, answer: Answer) -> None:
        right = self.right[question]
        if answer.finish not in ("stop", "length"):
            raise BadAnswer(f"finish_reason is {answer.finish!r}")
        if answer.text != right:
            same = next((place for place, (a, b) in enumerate(zip(answer.text, right, strict=False)) if a != b), None)
            where = f"from character {same}" if same is not None else f"{len(answer.text)} for {len(right)} characters"
            raise BadAnswer(f"another text, {where}")

    def _outage(self, error: Exception, begun: float) -> Outage | None:
        if not isinstance(error, httpx.TransportError) or isinstance(error, httpx.TimeoutException):
            return None
        now = time.monotonic()
        return next((each for each in self.outages if begun <= each.back_at and now >= each.killed_at), None)

    def _fail(self, kind: str, question: Question, answer: Answer, why: str, *, begun: float) -> None:
        self.tally.ended[f"{kind} failed"] += 1
        at_s, took_s = (round(each, 1) for each in (begun - self._begun, time.monotonic() - begun))
        self.tally.failed.append(
            {
                "kind": kind,
                "at_s": at_s,
                "took_s": took_s,
                "why": why,
                **asdict(question),
                **asdict(answer),
                "text": answer.text[:80],
            }
        )

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Timeout(30.0, read=READ_S)
        return httpx.AsyncClient(base_url=self.url, timeout=limits, trust_env=False)
