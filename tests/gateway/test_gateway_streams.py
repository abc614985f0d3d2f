"""A stream's events without HTTP or a session; an error becomes a status or an event."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from gateway.loops import in_loop, until

if not all(map(find_spec, ("starlette", "prometheus_client"))):
    pytest.skip("needs the extra serve", allow_module_level=True)

from stoker.apps.common.models_file import ModelSettings
from stoker.apps.common.openai_answers import TextBegun
from stoker.apps.common.openai_requests import Endpoint
from stoker.apps.gateway import streaming, wire
from stoker.apps.gateway.figures import GatewayMetrics, RunningRequest
from stoker.apps.gateway.keys import CountedRequest, KeyUse
from stoker.apps.gateway.served import ServedModel
from stoker.apps.gateway.streaming import ChunkEncoder, StreamedAnswer
from stoker.apps.gateway.usage import UsageFile, UsageRecorder
from stoker.errors import ContextError


async def never():
    return False


def answer_of(pieces, *, is_hot=never, use=None):
    metrics = GatewayMetrics(UsageRecorder(UsageFile(Path("none"))))
    running = RunningRequest(metrics, ServedModel("m", ModelSettings(path="m")), Endpoint.CHAT, begun=0.0)
    chunks = ChunkEncoder(endpoint=Endpoint.CHAT, name="n", model="m", created=1, per_prompt=1, usage=False)

    async def waits_for(_model):
        return "loading m"

    async def facts(_model):
        return SimpleNamespace(hot=await is_hot())

    running.held = CountedRequest((use or KeyUse(running=1)).count_request_end)
    watch = SimpleNamespace(explain_wait=waits_for, read_facts=facts)
    return StreamedAnswer(pieces, chunks, running, watch, failed=lambda _error: None)


async def fails(*pieces, after=None):
    for piece in pieces:
        yield 0, [piece]
    if after is not None:
        await after.wait()
    raise ContextError("out of memory")


def code_of(event):
    return json.loads(event.removeprefix(b"data: "))["error"]["code"]


@in_loop
async def test_error_before_the_first_piece_is_raised_and_not_streamed():
    answer = answer_of(fails())
    with pytest.raises(ContextError, match="out of memory"):
        await answer.wait_for_first_piece()
    await answer.end_calls()


@pytest.mark.parametrize("waits", [True, False], ids=["while it waits", "between two pieces"])
@in_loop
async def test_abandoned_stream_counts_as_running_until_its_calls_end(waits):
    use = KeyUse(running=1)
    answer = answer_of(fails(TextBegun(3), TextBegun(3), after=asyncio.Event()), use=use)
    await answer.wait_for_first_piece()
    events = answer.stream_events()
    await anext(events)
    if waits:
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    await events.aclose()
    await answer.end_request()
    assert use.running == 1
    await until(lambda: not use.running)


@in_loop
async def test_error_after_a_piece_is_the_last_event():
    answer = answer_of(fails(TextBegun(3)))
    await answer.wait_for_first_piece()
    begun, error = [event async for event in answer.stream_events()]
    await answer.end_request()
    assert json.loads(begun.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert code_of(error) == "model_unavailable"


@in_loop
async def test_error_after_a_comment_is_the_last_event(monkeypatch):
    monkeypatch.setattr(streaming, "_HEADERS_S", 0.0)
    fail, events = asyncio.Event(), []
    answer = answer_of(fails(after=fail))
    await answer.wait_for_first_piece()
    async for event in answer.stream_events():
        events.append(event)
        fail.set()
    await answer.end_request()
    comment, *_, error = events
    assert comment == b": loading m\n\n"
    assert code_of(error) == "model_unavailable"


def test_stream_that_waits_for_a_piece_sends_comments(monkeypatch):
    monkeypatch.setattr(wire, "_SILENT_S", 0.0)
    sent, commented, left = [], asyncio.Event(), []

    async def pieces():
        yield b"data: 1\n\n"
        await commented.wait()  # as when a pilot is lost and the call waits for another pilot
        yield b"data: 2\n\n"

    async def send(message):
        sent.append(message.get("body"))
        if message.get("body", b"").startswith(b":"):
            commented.set()

    async def at_end():
        left.append(True)

    asyncio.run(wire.EventStream(pieces(), at_end=at_end)({}, asyncio.Event().wait, send))
    assert [body for body in sent if body and not body.startswith(b":")] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert b": waiting\n\n" in sent
    assert (sent[-1], left) == (b"", [True])


@in_loop
async def test_stream_of_a_loaded_model_delays_its_headers_for_longer(monkeypatch):
    monkeypatch.setattr(streaming, "_HEADERS_S", 0.0)
    monkeypatch.setattr(streaming, "_HOT_HEADERS_S", 1000.0)
    fail = asyncio.Event()

    async def is_hot():
        fail.set()  # the failure comes after the limit of an unloaded model
        return True

    answer = answer_of(fails(after=fail), is_hot=is_hot)
    with pytest.raises(ContextError):
        await answer.wait_for_first_piece()
    await answer.end_calls()


@pytest.mark.parametrize(
    ("streams", "at_once", "sent"),
    [(wire._FEW_STREAMS, False, 4), (wire._FEW_STREAMS + 1, False, 2), (wire._FEW_STREAMS + 1, True, 4)],
)
def test_quick_events_are_joined_in_many_streams(monkeypatch, streams, at_once, sent):
    """A pause between events lasts 1,000 s, so a stream that pauses sends no further event during the test."""
    monkeypatch.setattr(wire, "_APART_S", 1000.0)

    async def run():
        all_open, bodies = asyncio.Barrier(streams), [[] for _ in range(streams)]

        async def pieces():
            await all_open.wait()
            for number in range(4):
                yield b"data: %d\n\n" % number

        async def send(to, message):
            if body := message.get("body"):
                to.append(body)

        asked = [
            wire.EventStream(pieces(), at_once=at_once)({}, asyncio.Event().wait, partial(send, to)) for to in bodies
        ]
        tasks = [asyncio.create_task(each) for each in asked]
        while min(map(len, bodies)) < sent:
            await asyncio.sleep(0)
        for _ in range(100):  # iterations of the event loop, in which a stream could send
            await asyncio.sleep(0)
        assert {len(each) for each in bodies} == {sent}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert wire.EventStream.open_streams == 0

    asyncio.run(run())
