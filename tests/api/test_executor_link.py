from __future__ import annotations

import dataclasses
import os
import pickle
import re
import threading
import time
from contextlib import closing
from typing import Any

import msgspec
import pytest
from polling import PATIENCE_S

from stoker.contexts.recipe import BARE, Recipe
from stoker.errors import ProtocolError, SessionError
from stoker.manager.executor import membership
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.futures import CallFuture
from stoker.manager.executor.outgoing import Submission, wait_for_answer
from stoker.manager.executor.processes import create_session_folder
from stoker.protocol import to_client, to_manager, wire
from stoker.protocol.calls import CallEnd, CallForecast, CallOptions
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.session import SessionFile, SessionFolder
from stoker.protocol.status import JOURNAL
from stoker.protocol.to_pilot import FunctionBlob

STATUS = to_client.Status("test", 0.0, 0, 0, 0, 0, 0.0, 0.0, (), (), (), {}, 0, 0, {})


def submission(name: str = "f", recipe: Recipe = BARE) -> Submission:
    return Submission(FunctionBlob(FunctionKey(name), name, b"function"), recipe, CallOptions())


def submit(link: ClientLink, what: Submission, payload: bytes = b"x") -> CallFuture:
    future = CallFuture(link)
    future.call = link.submit(what, payload, future)
    return future


def done(call: CallId, value: Any = None) -> CallEnd:
    return CallEnd(call, True, pickle.dumps(value, 5))


def test_hello_is_the_first_frame_and_names_the_session(link, router):
    sequence, messages = router.frames[0]
    assert sequence == 0
    assert messages == [to_manager.ClientHello(wire.VERSION, "test", 0, False)]


def test_calls_of_a_map_count_each_device_of_their_gangs(link):
    gangs = dataclasses.replace(submission(), options=CallOptions(gang=(2, 4)))
    link.submit_many(gangs, [b"x"] * 3, CallFuture(link))
    assert link.open_calls.slots == 6


def test_call_ids_carry_the_client_number(router, unwelcomed):
    router.welcome(number=3)
    unwelcomed.wait_joined(PATIENCE_S)
    assert submit(unwelcomed, submission()).call == 3 << 40


def test_results_settle_futures_and_are_acknowledged(link, router):
    futures = [submit(link, submission()) for _ in range(3)]
    calls = [spec.call for spec in router.calls(3)]
    router.answer([done(call, index) for index, call in enumerate(calls)])
    assert [future.result(PATIENCE_S) for future in futures] == [0, 1, 2]
    assert router.hear(to_manager.Received)[-1].total == 3


def test_duplicate_results_and_results_after_a_gap_are_ignored(link, router):
    one, two = submit(link, submission()), submit(link, submission())
    first, second = (spec.call for spec in router.calls(2))
    router.answer([done(first, "right")])
    assert one.result(PATIENCE_S) == "right"
    router.answer([done(second, "from the future")], first=5)
    router.answer([done(first, "again"), done(second, "right too")], first=0)
    assert two.result(PATIENCE_S) == "right too"
    assert one.result() == "right"


def test_reconnection_sends_hello_then_unacknowledged_frames(link, router, until):
    submit(link, submission("a"))
    router.calls(1)
    router.say(to_client.Ack(1))
    answered = submit(link, submission("b"))
    call = router.calls(2)[1].call
    router.answer([done(call)])
    answered.result(PATIENCE_S)
    router.break_connection(link)
    late = submit(link, submission("c"))
    router.listen()
    hello = router.hear(to_manager.ClientHello)[0]
    assert hello.received == 1
    assert router.all(to_manager.Submit) == []
    router.frames.clear()
    router.say(to_client.ClientWelcome("test", 0))
    calls = until(lambda: _heard(router, "c"))
    assert [message.function for message in router.all(to_manager.Submit)] == ["b", "c"]
    assert [sequence for sequence, _ in router.frames] == list(range(2, 2 + len(router.frames)))
    router.say(to_client.Results(1, [done(calls[0].call, "made it")]))
    assert late.result(PATIENCE_S) == "made it"


def test_forecast_end_time_is_converted_to_the_program_clock(link, router, until):
    future = submit(link, submission())
    [call] = router.calls(1)
    before = time.time()
    router.say(to_client.Forecasts([CallForecast(call.call, 5060.0, True)], said_at=5000.0))
    assert before <= until(lambda: future.forecast).ends_at - 60 <= time.time()


def _heard(router, function):
    router.read()
    return next((message.calls for message in router.all(to_manager.Submit) if message.function == function), None)


def test_cancel_is_sent_to_the_manager_and_late_results_are_ignored(link, router):
    future = submit(link, submission())
    call = router.calls(1)[0].call
    assert future.cancel()
    assert router.hear(to_manager.Cancel)[0].calls == [call]
    other = submit(link, submission())
    router.answer([done(call, "too late"), done(router.calls(2)[1].call, "fine")])
    assert other.result(PATIENCE_S) == "fine"
    assert future.cancelled()
    assert not other.cancel()


def test_call_cancelled_before_sending_is_not_sent(router, unwelcomed):
    gone, kept = submit(unwelcomed, submission("gone")), submit(unwelcomed, submission("kept"))
    gone.cancel()
    router.welcome()
    router.calls(1)
    assert [message.function for message in router.all(to_manager.Submit)] == ["kept"]
    assert not kept.done()


def test_many_threads_can_submit_at_once(link, router):
    submissions = [submission(str(number)) for number in range(8)]
    futures: list[CallFuture] = []
    threads = [
        threading.Thread(target=lambda one=one: [futures.append(submit(link, one)) for _ in range(250)])
        for one in submissions
    ]
    for thread in threads:
        thread.start()
    calls = [spec.call for spec in router.calls(2000)]
    for thread in threads:
        thread.join()
    assert len(set(calls)) == 2000
    assert [sequence for sequence, _ in router.frames[1:]] == list(range(1, len(router.frames)))
    router.answer([done(call, call) for call in calls])
    assert all(future.result(PATIENCE_S) == future.call for future in futures)
    assert not link.open_calls


def test_link_misses_no_message_while_it_sends_and_receives(link, router):
    for turn in range(200):
        future = submit(link, submission())
        router.answer([done(router.calls(turn + 1)[-1].call, turn)])
        link.send_message(to_manager.ParslBlockStates({}))
        assert future.result(PATIENCE_S) == turn


def test_end_of_the_session_fails_pending_and_later_calls(link, router):
    future = submit(link, submission())
    router.calls(1)
    router.say(to_client.SessionOver("stoker down"))
    with pytest.raises(SessionError, match="stoker down"):
        future.result(PATIENCE_S)
    with pytest.raises(SessionError, match="stoker down"):
        submit(link, submission())
    assert link.wait_finished(1)
    with pytest.raises(SessionError):
        link.ask_status().result(1)


def test_disconnected_program_reads_the_session_end_from_its_folder(link, router):
    future = submit(link, submission())
    router.calls(1)
    router.folder.lease.write_bytes(msgspec.json.encode({"over": "stoker down"}))
    router.hang_up()
    with pytest.raises(SessionError, match="session test is over: stoker down"):
        future.result(PATIENCE_S)
    with pytest.raises(SessionError, match="stoker down"):
        submit(link, submission())
    assert link.wait_finished(0)


@pytest.mark.parametrize("what", ["a call", "many calls", "a question"])
def test_calls_added_while_the_session_ends_fail(link, monkeypatch, what):
    def late(owner, name):
        add = getattr(owner, name)

        def add_late(*args, **options):
            link.fail_all(SessionError("stoker down"))
            return add(*args, **options)

        monkeypatch.setattr(owner, name, add_late)

    future: Any = CallFuture(link)
    if what == "a question":
        late(link._questions, "add_question")
        future = link.ask_status()
    elif what == "a call":
        late(link.open_calls, "add")
        link.submit(submission(), b"x", future)
    else:
        late(link.open_calls, "add_all")
        link.submit_many(submission(), [b"x"], future)
    with pytest.raises(SessionError, match="stoker down"):
        future.result(1)


def test_a_rejected_call_fails_with_the_reason(link, router):
    future, other = submit(link, submission()), submit(link, submission())
    call = router.calls(2)[0].call
    router.say(to_client.Rejected("no such context", (call,)))
    with pytest.raises(ProtocolError, match="no such context"):
        future.result(PATIENCE_S)
    assert not other.done()


def test_a_client_with_another_key_is_refused(router, tmp_path):
    other = SessionFolder(tmp_path / "other")
    create_session_folder(other)
    other.write(router.folder.read())
    other.write_key("client", router.folder.read_key("client"))
    stranger = router.folder.read()
    server = other.read_key("server").public
    other.write(type(stranger)(stranger.session, stranger.protocol, stranger.address, server))
    with closing(ClientLink(other)) as link, pytest.raises(SessionError):
        link.wait_joined(0.5)


def test_joining_program_reports_an_unwritable_journal(router, unwelcomed, monkeypatch, caplog, until):
    full = "the journal cannot be written (No space left on device): the disk of /runs is full"
    monkeypatch.setattr(membership, "SLOW_S", 0.2)
    router.hear(to_manager.ClientHello)
    router.say(msgspec.structs.replace(STATUS, trouble={JOURNAL: full}))
    until(lambda: unwelcomed.journal_trouble)
    with pytest.raises(SessionError, match=f"accepts no programs: {re.escape(full)}; this program waited for 1 s"):
        unwelcomed.wait_joined(1.0)
    assert any(f"{full}; this program waits up to 1 s for it" in record.getMessage() for record in caplog.records)
    router.welcome()
    unwelcomed.wait_joined(PATIENCE_S)
    router.say(STATUS)
    until(lambda: not unwelcomed.journal_trouble)


def test_unreadable_frame_from_the_manager_is_ignored(link, router):
    future = submit(link, submission())
    call = router.calls(1)[0].call
    router.socket.send_multipart([router._peer, b"\xc1 not a frame"])
    router.socket.send_multipart([router._peer, b""])
    router.answer([done(call, "still here")])
    assert future.result(PATIENCE_S) == "still here"


def test_forked_child_keeps_the_argument_files_of_its_parent(link, router):
    payload = link.large_arguments.store_arguments(b"large")
    future = CallFuture(link)
    future.call = link.submit(submission(), payload, future)
    router.calls(1)
    child = os.fork()
    if not child:
        future.cancel()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.exists(payload.source)
    future.cancel()
    assert not os.path.exists(payload.source)


def test_closing_fails_pending_calls_of_a_silent_manager(link):
    future = submit(link, submission())
    assert f"the file system of {link.folder.path} hangs" in link.explain_silence()
    link.close()
    with pytest.raises(SessionError, match="closed"):
        future.result(1)
    assert link.explain_silence() == ""


# ---- questions


def test_unanswered_queries_are_sent_again_after_a_reconnect(link, router):
    gone, kept = link.ask_for_story("c-1"), link.ask_for_story("c-2")
    router.hear(to_manager.AskStory, count=2)
    assert all(sequence == 0 for sequence, messages in router.frames if isinstance(messages[0], to_manager.AskStory))
    gone.cancel()
    router.break_connection(link)
    router.listen()
    router.welcome()
    assert [question.subject for question in router.hear(to_manager.AskStory)] == ["c-2"]
    router.say(to_client.Story("c-2", True, "headline", ()))
    assert kept.result(PATIENCE_S).headline == "headline"


def test_answers_to_cancelled_queries_do_not_reach_another_query(link, router):
    for number in range(5):
        asked = link.ask_for_story(f"c-{number}")
        router.hear(to_manager.AskStory, count=number + 1)  # a request cancelled before sending is never sent
        with pytest.raises(TimeoutError):
            wait_for_answer(asked, timeout_s=0)
    story = link.ask_for_story("c-5")
    heard = router.hear(to_manager.AskStory, count=6)
    router.say(*[to_client.Story(question.subject, True, "headline", ()) for question in heard])
    assert story.result(PATIENCE_S).subject == "c-5"


def test_link_closes_while_its_thread_reads_the_wake_up_pipe(tmp_path, monkeypatch):
    reads = threading.Event()
    turn = ClientLink._handle_ready_descriptors

    def slow_turn(link, ready):
        reads.set()
        time.sleep(0.2)  # the link is closed now, and its thread reads the wake-up message in this iteration
        turn(link, ready)

    monkeypatch.setattr(ClientLink, "_handle_ready_descriptors", slow_turn)
    folder = SessionFolder(tmp_path / "session")
    create_session_folder(folder)
    public = folder.read_key("client").public
    folder.write(SessionFile("test", wire.VERSION, "tcp://127.0.0.1:1", public))
    link = ClientLink(folder)
    assert reads.wait(PATIENCE_S)
    closing = threading.Thread(target=link.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
