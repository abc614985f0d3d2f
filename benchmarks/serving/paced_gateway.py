"""A gateway whose engine writes at a fixed pace without computation: one token of each stream per step.

`python -m benchmarks.serving.paced_gateway SECONDS` prints its port. `SECONDS`: duration of a step.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memoryless_engine import MemorylessEngine

import stoker
from stoker.apps.common.models_file import ModelSettings
from stoker.apps.common.openai_answers import TextBegun, TextEnded, TextPiece
from stoker.apps.common.openai_requests import ApiRequest
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.contexts.inference.adapter import EngineLoad, FinishReason, GenerationRequest, NewToken, Sampling

if TYPE_CHECKING:
    from stoker.contexts.inference.engine_thread import EngineThread
    from stoker.contexts.text_writer import CompletionTexts

MOST_STREAMS = 1000
REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "stream": True}


class PacedEngine(MemorylessEngine):
    name, chosen = "paced", "for the benchmark"

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due = 0.0
        self._left: dict[int, int] = {}

    def add(self, request: GenerationRequest) -> None:
        self._left[request.id] = request.sampling.max_new_tokens

    def abort(self, request: int) -> None:
        self._left.pop(request, None)

    def step(self) -> list[NewToken]:
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._due = max(self._due, time.monotonic() - self._every_s) + self._every_s
        self._left = {id: left - 1 for id, left in self._left.items()}
        tokens = [
            NewToken(id, left, f"{left} ", None if left else FinishReason.LENGTH) for id, left in self._left.items()
        ]
        self._left = {id: left for id, left in self._left.items() if left}
        return tokens

    def get_load(self) -> EngineLoad:
        return EngineLoad(running=len(self._left))

    def count_slots(self) -> int:
        return MOST_STREAMS

    def stop(self) -> None:
        pass


@stoker.context(slots=MOST_STREAMS)
def pace(every_s: float) -> EngineThread:
    from stoker.contexts.inference.engine_thread import EngineThread  # imports torch, which gateways do not need

    return EngineThread(lambda: PacedEngine(every_s))


@stoker.app(stream=True)
def write_pieces(thread: EngineThread, request: ApiRequest) -> Iterator[TextPiece | CompletionTexts]:
    from stoker.contexts.text_writer import CompletionTexts  # imports torch

    sampling = Sampling(max_new_tokens=request.sampling.max_new_tokens)
    yield TextBegun(1)
    texts = CompletionTexts(lambda sink: thread.submit((0,), sampling, pieces=True, sink=sink))
    yield texts
    yield TextEnded(texts.finish_reason, texts.tokens)


class FakeModel(ServedModel):
    def __init__(self, every_s: float) -> None:
        super().__init__("fake", ModelSettings(path="fake"))
        self.recipe = self.context = pace(every_s)
        self.writes = write_pieces.with_options(context=self.context)
        self._apps = {"pieces": self.writes}


def serve(every_s: float) -> None:
    import uvicorn

    from stoker.apps.gateway.http import GatewayApplication
    from stoker.apps.gateway.keys import KeyFile, KeyGuard
    from stoker.apps.gateway.served import SessionWatch
    from stoker.apps.gateway.usage import UsageFile, UsageRecorder

    with stoker.load(progress=False) as session, socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        models, model = ServedModels({}), FakeModel(every_s)
        models["fake"] = model
        session.warm(model.context).result()
        watch, guard, usage = (
            SessionWatch(session, models),
            KeyGuard(KeyFile.at_default_path()),
            UsageRecorder(UsageFile.at_default_path()),
        )
        gateway = GatewayApplication(models, watch, guard, site="fake", most_bytes=1_000_000, usage=usage)
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(gateway.build_application(), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    serve(float(sys.argv[1]))
