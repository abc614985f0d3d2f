from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from advice.fake_endpoint import FakeEndpoint

from stoker.contexts.factory import RecipeFactory
from stoker.contexts.folders import state_folder
from stoker.contexts.performance import PerformanceStore
from stoker.contexts.recipe import BARE, Recipe
from stoker.manager.advice import estimating
from stoker.manager.advice.answers import SIMILAR, Advisor, answer_until_closed, find_advice_model
from stoker.manager.advice.endpoint import ModelEndpoint
from stoker.manager.core.events import (
    AskAdvice,
    CostAdvice,
    OfContext,
    OfFailure,
    OfFunction,
    OfPace,
    PaceAdvice,
    VerdictAdvice,
    decode_answer,
    encode,
)
from stoker.manager.executor.session_files import ProgramSourceStore
from stoker.protocol.ids import CallId, FunctionKey, LibraryId, PilotId, RecipeKey
from stoker.protocol.session import SessionFolder, program_source_file

pytest.importorskip("numpy", reason="similar recipes are found with it")
pytest.importorskip("httpx", reason="the endpoint is asked through httpx")

FULL_DISK = "OSError: [Errno 28] No space left on device: '/scratch/out.pt'"
PROGRAM = '''
import torch
from transformers import AutoModel


def load(name, hidden=768):
    """{comment}"""
    return AutoModel.from_pretrained(name)


def score(context, texts, batch_size={batch}):
    total = 0
    for start in range(0, len(texts), batch_size):
        total += len(context(texts[start : start + batch_size]))
    return total
'''


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SessionFolder:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    estimating.open_history.cache_clear()
    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    return folder


Program = Callable[..., tuple[Recipe, str]]


@pytest.fixture
def program(session: SessionFolder, tmp_path: Path) -> Program:
    """Record the sources of a program; return its recipe and function key."""

    def run(name: str, *, comment: str = "The model.", batch: int = 8, model: str = "bert-base") -> tuple[Recipe, str]:
        file = tmp_path / f"{name}.py"
        file.write_text(PROGRAM.format(comment=comment, batch=batch))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # The import is missing intentionally, because the advisor reads the source without running it.
        text = file.read_text().replace("import torch\nfrom transformers import AutoModel\n", "AutoModel = None\n\n")
        exec(compile(text, str(file), "exec"), module.__dict__)
        recipe = RecipeFactory(module.load, {})(model)
        ProgramSourceStore(session.sources).store_sources(f"key-{name}", module.score, recipe)
        return recipe, f"key-{name}"

    return run


def ask_context(advisor: Advisor, recipe: Recipe) -> Any:
    return advisor.answer_question(AskAdvice(OfContext(RecipeKey(recipe.key)), recipe.name))


def ask_function(advisor: Advisor, function: str, recipe: Recipe) -> Any:
    return advisor.answer_question(AskAdvice(OfFunction(FunctionKey(function), RecipeKey(recipe.key)), "score"))


def measured(recipe: Recipe, *, load_s: float, run_s: float) -> None:
    store = PerformanceStore(state_folder() / "performance.sqlite")
    store.record_load(recipe.key, kind="cpu", load_s=load_s, peak_bytes=5_000_000, resident_bytes=4_000_000)
    store.record_runs(recipe.key, kind="cpu", function="score", run_s=[run_s])
    store.close()


def test_edited_source_comment_keeps_measured_load_and_run_times(session: SessionFolder, program: Program):
    advisor = Advisor(session)
    before, key = program("before")
    assert ask_context(advisor, before) is None
    assert ask_function(advisor, key, before) is None
    measured(before, load_s=40.0, run_s=3.0)
    after, edited = program("after", comment="The model, which is small.")
    assert after.key != before.key
    loads, runs = ask_context(advisor, after), ask_function(advisor, edited, after)
    assert loads.source == runs.source == SIMILAR
    assert loads.advice.by_kind["cpu"].load_s == pytest.approx(40.0, rel=0.3)
    # these facts come from the earlier program, whose source and arguments are equal
    assert loads.advice.by_kind["cpu"].peak_bytes >= 5_000_000
    assert runs.advice.by_kind["cpu"].run_s == pytest.approx(3.0, rel=0.3)


def test_memory_measured_for_another_model_is_ignored(session: SessionFolder, program: Program):
    advisor = Advisor(session)
    before, _ = program("before")
    ask_context(advisor, before)
    measured(before, load_s=40.0, run_s=3.0)
    other, _ = program("other", model="bert-large", batch=16)
    answer = ask_context(advisor, other)
    assert answer.advice.by_kind["cpu"].load_s > 0
    assert answer.advice.by_kind["cpu"].peak_bytes == 0


def test_measurements_of_the_same_function_replace_estimates(session: SessionFolder, program: Program):
    recipe, key = program("mine")
    measured(recipe, load_s=1.0, run_s=7.0)
    answer = ask_function(Advisor(session), key, recipe)
    assert answer.source == "history"
    assert answer.advice == CostAdvice({"cpu": answer.advice.by_kind["cpu"]})
    assert answer.advice.by_kind["cpu"].run_s == 7.0


def test_missing_or_damaged_source_gives_no_answer(session: SessionFolder, program: Program):
    recipe, key = program("mine")
    advisor = Advisor(session)
    assert ask_function(advisor, "unknown", BARE) is None
    program_source_file(session.sources, key).write_bytes(b"\xff\x00{")
    assert ask_function(advisor, key, BARE) is None
    for text in session.sources.glob("*.text"):
        text.write_bytes(b"def score(:\n\xff\xfe not Python")
    assert ask_context(advisor, recipe) is None


def test_program_source_is_stored_once_with_at_most_200_functions(session: SessionFolder):
    shelf = ProgramSourceStore(session.sources)
    for number in range(300):
        shelf.store_sources(f"k{number}", measured, BARE)
    assert len(list(session.sources.glob("*.json"))) == 200
    assert len(list(session.sources.glob("*.text"))) == 1


# ---- failures and paces


def test_failure_is_classified_by_its_log_section_and_exception(session: SessionFolder, tmp_path: Path):
    log = tmp_path / "lib-1.log"
    before = b"CUDA error: uncorrectable ECC error encountered\n"
    log.write_bytes(before + b"epoch 1\nKeyError: 'label'\n")
    about = OfFailure(PilotId("p1"), LibraryId(1), CallId(3))
    said = "KeyError: 'label'\nat /home/ana/run.py:12 in score"
    answer = Advisor(session).answer_question(AskAdvice(about, "f", str(log), len(before), log.stat().st_size, said))
    assert isinstance(answer.advice, VerdictAdvice)
    assert (answer.advice.kind, answer.advice.component) == ("user", "code")
    gone = Advisor(session).answer_question(AskAdvice(about, "f", str(tmp_path / "gone.log"), said=said))
    assert isinstance(gone.advice, VerdictAdvice)
    assert gone.advice.kind == "user"
    assert Advisor(session).answer_question(AskAdvice(about, "f", said="")) is None


def test_slowdown_is_reported_as_a_share_of_the_best_step_rate(session: SessionFolder, tmp_path: Path):
    log, advisor = tmp_path / "lib-1.log", Advisor(session)
    question = AskAdvice(OfPace(LibraryId(1), CallId(3)), "f", str(log))
    log.write_text("".join(f"step {n}/1000 loss 0.5 10.0 it/s\n" for n in range(1, 60)))
    fast = advisor.answer_question(question)
    assert isinstance(fast.advice, PaceAdvice)
    assert (fast.advice.done, fast.advice.total, fast.advice.slowed) == (59.0, 1000.0, 0.0)
    with log.open("a") as file:
        file.write("".join(f"step {n}/1000 loss 0.5 5.0 it/s\n" for n in range(60, 160)))
    slow = advisor.answer_question(question)
    assert isinstance(slow.advice, PaceAdvice)
    assert slow.advice.slowed == pytest.approx(0.5, abs=0.05)


# ---- a language model


def site(session: SessionFolder, url: str, **settings: Any) -> None:
    lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in settings.items()]
    session.sites.mkdir(exist_ok=True)
    text = f'name = "here"\n[advice]\nurl = "{url}"\nmodel = "fake"\n' + "\n".join(lines) + "\n"
    (session.sites / "here.toml").write_text(text)


def test_language_model_of_the_site_fills_in_missing_facts(
    session: SessionFolder, program: Program, endpoint: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    endpoint.answer = lambda request, number: 'Final Answer: {"model": "bert-base", "task": "score"}'
    site(session, endpoint.url, key_variable="MY_KEY", tokens=20_000, time_limit="5 s")
    model = find_advice_model(session)
    assert (model.model, model.key_variable, model.tokens, model.time_limit_s) == ("fake", "MY_KEY", 20_000, 5.0)
    recipe, _ = program("mine")
    advisor = Advisor(session, endpoint=ModelEndpoint(model))
    ask_context(advisor, recipe)
    assert endpoint.asked
    assert "sk-secret" not in str(endpoint.asked)
    facts = advisor._extract_facts_of_source(recipe.key)
    assert facts.task.value == "score"


def test_hanging_language_model_is_given_up_at_its_time_limit(
    session: SessionFolder, program: Program, endpoint: FakeEndpoint
):
    endpoint.answer = lambda request, number: endpoint.released.wait(30) and "too late"
    site(session, endpoint.url, time_limit="1 s")
    recipe, _ = program("mine")
    advisor = Advisor(session, endpoint=ModelEndpoint(find_advice_model(session)))
    assert ask_context(advisor, recipe) is None  # the history has no similar program
    facts = advisor._extract_facts_of_source(recipe.key)
    assert facts.known_facts()
    assert any("could not be used" in note for note in facts.notes)


def test_language_model_is_not_called_without_a_url(session: SessionFolder):
    assert find_advice_model(session) is None
    (session.sites / "here.toml").write_text('name = "here"\n')
    assert find_advice_model(session) is None
    (session.sites / "here.toml").write_text("name = ")
    assert find_advice_model(session) is None


LINE = "trained {step}/4000: penalty {loss:.3f}, 250ms each\n"


def line_answer(request: dict[str, Any], number: int) -> str:
    step = request["messages"][-1]["content"].split("/")[0].rpartition(" ")[2]
    return f'{{"step": "{step}", "total_steps": "4000", "seconds_per_step": "250"}}'


def test_progress_query_does_not_wait_for_an_unknown_log_format(
    session: SessionFolder, endpoint: FakeEndpoint, tmp_path: Path
):
    endpoint.answer = line_answer
    site(session, endpoint.url)
    log = tmp_path / "lib-1.log"
    log.write_text("".join(LINE.format(step=step, loss=900 / step) for step in range(100, 140)))
    question = AskAdvice(OfPace(LibraryId(1), CallId(3)), "f", str(log))
    advisor = Advisor(session, endpoint=ModelEndpoint(find_advice_model(session)))
    assert advisor.answer_question(question) is None
    assert advisor.learning is not None
    advisor.learning.result(60)
    pace = advisor.answer_question(question)
    assert isinstance(pace.advice, PaceAdvice)
    assert (pace.advice.done, pace.advice.total, pace.advice.per_s) == (139.0, 4000.0, pytest.approx(4.0))
    later = Advisor(session, endpoint=ModelEndpoint(find_advice_model(session))).answer_question(question)
    assert later.advice == pace.advice
    assert len(endpoint.asked) == 1
    assert Advisor(session).answer_question(question) is None


def test_hanging_language_model_does_not_delay_a_certain_verdict(session: SessionFolder, endpoint: FakeEndpoint):
    endpoint.answer = lambda request, number: endpoint.released.wait(60) and "too late"
    site(session, endpoint.url, time_limit="60 s")
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        advisor = Advisor(session, endpoint=ModelEndpoint(find_advice_model(session)))
        thread = threading.Thread(target=answer_until_closed, args=(its, advisor), daemon=True)
        thread.start()
        for call, said in enumerate(("storaged: a lease failed", FULL_DISK)):
            ours.send(encode(AskAdvice(OfFailure(PilotId("p1"), LibraryId(1), CallId(call)), "f", said=said)))
        ours.settimeout(60)
        certain = decode_answer(ours.recv(65536))
        assert certain.about.call == 1
        assert certain.found.advice.kind == "infrastructure"
        endpoint.released.set()
        doubted = decode_answer(ours.recv(65536))
        assert doubted.about.call == 0
        assert doubted.found.advice.sure < 0.7, "the rules' verdict stands"
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_language_model_judges_an_uncertain_failure(session: SessionFolder, endpoint: FakeEndpoint):
    said = "storaged: a lease failed"
    endpoint.answer = lambda request, number: f'{{"line": "{said}", "cause": "framework", "component": "none"}}'
    site(session, endpoint.url)
    advisor = Advisor(session, endpoint=ModelEndpoint(find_advice_model(session)))
    question = AskAdvice(OfFailure(PilotId("p1"), LibraryId(1), CallId(3)), "f", said=said)
    first = advisor.answer_question(question)
    assert advisor.needs_model_opinion(first)
    assert not Advisor(session).needs_model_opinion(first)
    assert endpoint.asked == []
    assert advisor.answer_with_model_opinion(question).advice.kind == "framework"
