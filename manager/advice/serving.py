"""What the advisor process does: it takes questions from its channel and sends answers.

Questions on sources and history, which may take seconds (a language model many), are answered one after the other in a
thread of their own, so that failures and paces need not wait for them.
"""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec

from stoker.config import read_sites
from stoker.errors import ConfigError
from stoker.log_files import keep_log
from stoker.manager.advice.answers import Advisor
from stoker.manager.advice.source.endpoint import LanguageModel
from stoker.manager.core.events import (
    LONGEST_MESSAGE,
    AdviceArrived,
    Answer,
    AskAdvice,
    OfContext,
    OfFunction,
    decode_question,
    encode,
)
from stoker.protocol.session import SessionFolder

log = logging.getLogger("stoker.advisor")


def serve(session: str, channel: socket.socket) -> None:
    """Answer the questions of a session until the other end of the channel is closed."""
    folder = SessionFolder(session)
    keep_log(folder.path / "advisor.log")
    log.info("an advisor begins: pid %d", os.getpid())
    answer_all(channel, Advisor(folder, model=model_of(folder)))


def model_of(folder: SessionFolder) -> LanguageModel | None:
    """The language model that the session's sites name, or None."""
    try:
        named = [site.advice for site in read_sites(folder.sites).values() if site.advice.url]
    except ConfigError as error:
        log.warning("no language model is asked: %s", error)
        return None
    if not named:
        return None
    said = named[0]
    return LanguageModel(
        said.url, said.model, said.key_variable, time_limit_s=float(said.time_limit_s), token_budget=said.tokens
    )


def answer_all(channel: socket.socket, advisor: Advisor) -> None:
    """Answer until the other end is closed. Ends the process then."""
    with ThreadPoolExecutor(1, thread_name_prefix="sources") as slow:
        while True:
            try:
                data = channel.recv(LONGEST_MESSAGE)
            except OSError:
                data = b""
            if not data:
                slow.shutdown(wait=False, cancel_futures=True)
                os._exit(0)  # a language model that does not answer is not waited for
            try:
                question = decode_question(data)
            except msgspec.MsgspecError as error:
                log.warning("a question cannot be read: %s", error)
                continue
            if isinstance(question.about, OfContext | OfFunction):
                slow.submit(_answer, channel, advisor, question)
            else:
                _answer(channel, advisor, question)


def _answer(channel: socket.socket, advisor: Advisor, question: AskAdvice) -> None:
    found: AdviceArrived | None = None
    try:
        found = advisor.answer(question)
    except ImportError as error:
        log.warning("no answer on %s: %s (pip install 'stoker[advice]' brings it)", question.about, error)
    except Exception:  # whatever a log or a source holds, the next question is answered
        log.exception("no answer on %s", question.about)
    try:
        channel.send(encode(Answer(question.about, found)))
    except OSError as error:
        log.info("the manager did not take an answer: %s", error)
