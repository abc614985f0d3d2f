"""Load on a gateway by Locust, which this project does not depend on.

    python -m venv locust && locust/bin/pip install locust
    locust/bin/locust -f benchmarks/serving/gateway_locust.py --headless -u 50 -r 10 -t 60s -H http://127.0.0.1:8000

/v1/models must list a language model first, then an encoder.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import json
import random
import time
from typing import Any

from locust import HttpUser, between, task

MESSAGES = [{"role": "user", "content": "What is two plus two?"}]


class Asker(HttpUser):  # type: ignore[misc]
    wait_time = between(0.0, 0.5)

    def on_start(self) -> None:
        self.writer, self.encoder = [model["id"] for model in self.client.get("/v1/models").json()["data"]][:2]

    @task(6)
    def stream(self) -> None:
        asked = {"model": self.writer, "messages": MESSAGES, "max_tokens": 32, "stream": True}
        begun, first, ended = time.perf_counter(), 0.0, False
        name = "/v1/chat/completions stream"
        with self.client.post(
            "/v1/chat/completions", json=asked, stream=True, catch_response=True, name=name
        ) as answer:
            for line in answer.iter_lines():
                if b'"delta":{"content"' in line and not first:
                    first = time.perf_counter()
                ended = ended or line == b"data: [DONE]"
            if answer.status_code != 200 or not ended:
                answer.failure(f"status {answer.status_code}, ended: {ended}")
        if first:
            self.environment.events.request.fire(
                request_type="POST", name="time to the first token", response_time=(first - begun) * 1000,
                response_length=0, exception=None, context={},
            )  # fmt: skip

    @task(3)
    def complete(self) -> None:
        asked = {"model": self.writer, "prompt": ["one", "two"], "max_tokens": 8, "n": 2}
        self._expect("/v1/completions", asked, choices=4)

    @task(3)
    def embed(self) -> None:
        self._expect("/v1/embeddings", {"model": self.encoder, "input": ["a text", "another"]}, data=2)

    @task(1)
    def leave_early(self) -> None:
        asked = {"model": self.writer, "messages": MESSAGES, "max_tokens": 200, "stream": True}
        name = "a stream that is left"
        with self.client.post(
            "/v1/chat/completions", json=asked, stream=True, catch_response=True, name=name
        ) as answer:
            next(answer.iter_lines())

    @task(1)
    def ask_wrongly(self) -> None:
        asked: dict[str, Any] = {"model": random.choice([self.writer, "none"]), "messages": "?" * 1000}
        with self.client.post(
            "/v1/chat/completions", json=asked, catch_response=True, name="a wrong request"
        ) as answer:
            if answer.status_code in (400, 404) and "message" in answer.json()["error"]:
                answer.success()

    def _expect(self, path: str, asked: dict[str, Any], **sizes: int) -> None:
        with self.client.post(path, data=json.dumps(asked), catch_response=True) as answer:
            found = answer.json() if answer.status_code == 200 else {}
            if any(len(found.get(name, ())) != size for name, size in sizes.items()):
                answer.failure(f"status {answer.status_code}: {answer.text:.200}")
