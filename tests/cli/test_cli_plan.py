from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli.command_line import Stoker

from stoker.errors import ConfigError, SessionError
from stoker.manager.advice import estimating
from stoker.manager.advice.answers import Advisor
from stoker.manager.cli.plan import render_plan
from stoker.manager.core.events import AskAdvice, OfContext, OfFunction
from stoker.manager.executor.session_files import ProgramSourceStore
from stoker.manager.live.advisor import open_performance_store
from stoker.manager.study import plan
from stoker.manager.study.plan import RunPlan
from stoker.protocol.ids import FunctionKey, RecipeKey
from stoker.protocol.session import SessionFolder


@pytest.fixture(autouse=True)
def _few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MANY_SEEDS", 5), ("FEW_SEEDS", 1), ("CALLS", 100)):
        monkeypatch.setattr(plan, name, value)


@pytest.fixture
def site(tmp_path: Path) -> str:
    path = tmp_path / "pool.toml"
    path.write_text('name = "pool"\n[provider]\nkind = "slurm"\ngpus = "a10:1"\nprice = 2.0\n[pilot]\nmax_blocks = 4\n')
    return str(path)


@pytest.fixture
def measured() -> None:
    store = open_performance_store()
    for function in (f"{Path.cwd()}/claims.py:verify", "stoker.apps.fact_verification.functions:verify"):
        store.record_runs("r", kind="NVIDIA A10", function=function, run_s=[2.0] * 40)
    store.record_load("r", kind="NVIDIA A10", load_s=9.0)
    store.close()


@pytest.mark.usefixtures("measured")
def test_plan_shows_time_resources_and_uncertainty(stoker: Stoker, site: str):
    shown = stoker.ok("plan", site, "fact_verification", "--inputs", "6400")
    lines = shown.output.splitlines()
    assert lines[0].startswith("plan · fact_verification on pool · 6,400 inputs in 400 calls")
    assert any(line.startswith("  finish ") and "in 8 of 10 cases" in line for line in lines)
    assert any(line.startswith("  cost ") and "at 2 a device-hour" in line for line in lines)
    assert any(line.startswith("  blocks ") for line in lines)
    assert any(line.startswith("how sure this is: poor") for line in lines)
    assert any("no block of pool was seen yet" in line for line in lines)


@pytest.mark.usefixtures("measured")
def test_cost_is_device_hours_times_the_price_of_the_site(stoker: Stoker, site: str):
    def cost_lines(price: float) -> list[str]:
        lines = render_plan(msgspec.structs.replace(found, price=price))
        return [line for line in lines if line.startswith("  cost ")]

    told = stoker("plan", site, "claims.py:verify", "--inputs", "30", "--json").output
    found = msgspec.json.decode(told, type=RunPlan)
    assert found.price == 2.0
    hours = found.as_written.device_hours
    for price in (2.0, 200.0):
        [line] = cost_lines(price)
        shown = [float(number) for number in re.findall(r"[0-9.]+", line.partition(",")[0])]
        assert shown == pytest.approx([price * hour for hour in (hours.p50, hours.p10, hours.p90)], abs=0.006)
    assert cost_lines(0.0) == [], "without a price no cost is printed"


@pytest.mark.usefixtures("measured")
def test_user_function_is_planned_by_its_name(stoker: Stoker, site: str):
    told = msgspec.json.decode(stoker("plan", site, "claims.py:verify", "--inputs", "50", "--json").output)
    assert told["work"] == {
        "app": "claims.py:verify", "function": f"{Path.cwd()}/claims.py:verify", "inputs": 50,
        "inputs_per_call": 1, "measured_per_call": 0,
    }  # fmt: skip
    assert told["as_written"]["finish_s"]["p50"] > 9.0
    assert told["price"] == 2.0
    how_many = stoker("plan", site, "claims.py:verify").exception
    assert isinstance(how_many, ConfigError)
    assert "--inputs" in str(how_many)


@pytest.mark.usefixtures("measured")
def test_differently_packed_inputs_cost_the_same_per_input(stoker: Stoker):
    Path("here.toml").write_text('name = "here"\n[pilot]\ndevices = "cpu:2"\n')

    def told(app: str, *more: str) -> list[str]:
        return stoker("plan", "here.toml", app, "--inputs", "400", *more).output.splitlines()

    single, packed = told("claims.py:verify"), told("claims.py:verify", "--per-call", "10")
    assert packed[0].startswith("plan · claims.py:verify on here · 400 inputs in 40 calls")
    assert "  policy        default" in packed
    assert any("are assumed to have had 1 input each" in line for line in packed)
    assert not any("are assumed to have had" in line for line in single)
    app = told("fact-verification", "--per-call", "4")
    assert any("are assumed to have had 16 inputs each" in line for line in app)


def test_plan_refuses_an_application_that_was_never_measured(stoker: Stoker, site: str):
    error = stoker("plan", site, "fact-verification").exception
    assert isinstance(error, SessionError)
    assert "make a short run first" in str(error)


def record(function: str, *, run_s: float) -> None:
    store = open_performance_store()
    store.record_runs("bare", kind="cpu", function=function, run_s=[run_s] * 40)
    store.close()


def test_functions_with_one_name_in_two_programs_are_distinguished(stoker: Stoker):
    Path("here.toml").write_text('name = "here"\n[pilot]\ndevices = "cpu:2"\n')
    for program, run_s in (("first.py", 1.0), ("second.py", 9.0)):
        record(f"{Path.cwd().resolve()}/{program}:slow", run_s=run_s)
        shown = stoker("plan", "here.toml", f"{program}:slow", "--inputs", "9").output
        assert f"a call of slow ran {run_s} s on cpu" in shown
    choice = str(stoker("plan", "here.toml", "slow", "--inputs", "9").exception)
    assert "several programs have a function slow; name one of them" in choice
    assert {"  first.py:slow", "  second.py:slow"} <= set(choice.splitlines())


PROGRAM_THAT_RUNS = """
import stoker

@stoker.app
def slow(number):
    return number

if __name__ == "__main__":
    with stoker.load("here.toml"):
        print(sum(stoker.map(slow, range(8))))
"""


def test_function_that_just_ran_is_found_by_its_file(stoker: Stoker):
    Path("here.toml").write_text('name = "here"\n[pilot]\ndevices = "cpu:1"\n')
    Path("first.py").write_text(PROGRAM_THAT_RUNS)
    ran = subprocess.run([sys.executable, "first.py"], capture_output=True, text=True, timeout=90, check=False)
    assert ran.stdout == "28\n", ran.stderr
    shown = stoker("plan", "here.toml", "first.py:slow", "--inputs", "9")
    assert "a call of slow ran" in shown.output, shown.exception
    assert "(8 calls measured)" in shown.output


# ---- functions that never ran

PROGRAM = '''
import stoker


@stoker.context
def model(name, layers=12):
    return load_model(name, layers)


{assigned}
@stoker.app(context={context})
def score(context, text, batch_size=16):
    """{comment}"""
    return context.score(text, batch_size)
'''


def ran_before(folder: Path, program: str) -> None:
    session = SessionFolder(folder / "session")
    session.create_folders()
    file = folder / "before.py"
    file.write_text(program)
    names: dict[str, Any] = {}
    exec(compile(program, str(file), "exec"), names)
    shelf, recipe, function = ProgramSourceStore(session.sources), names["model"]("small"), names["score"]
    shelf.store_sources("f", function, recipe)
    estimating.open_history.cache_clear()
    advisor = Advisor(session)
    advisor.answer_question(AskAdvice(OfContext(RecipeKey(recipe.key)), recipe.name))
    advisor.answer_question(AskAdvice(OfFunction(FunctionKey("f"), RecipeKey(recipe.key)), "score"))
    store = open_performance_store()
    store.record_load(recipe.key, kind="cpu", load_s=30.0)
    store.record_runs(recipe.key, kind="cpu", function="score", run_s=[4.0])
    store.close()
    estimating.open_history.cache_clear()


@pytest.mark.parametrize("context", ['model("small")', "made"])
def test_function_that_never_ran_is_planned_by_similar_functions(
    stoker: Stoker, tmp_path: Path, context: str, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("numpy", reason="similar recipes are found with it")
    ran_before(tmp_path, PROGRAM.format(comment="Scores.", context='model("small")', assigned=""))
    text = PROGRAM.format(comment="Says how good a text is.", context=context, assigned='made = model("small")')
    (tmp_path / "mine.py").write_text(text)
    site = tmp_path / "here.toml"
    site.write_text('name = "here"\n[pilot]\ndevices = "cpu:2"\n')
    shown = stoker.ok("plan", str(site), f"{tmp_path}/mine.py:score", "--inputs", "100")
    assert "no call of score was measured; a call is estimated to run 4" in shown.output
    assert "its context is estimated to load in 3" in shown.output
    assert "how sure this is: poor" in shown.output
    told = msgspec.json.decode(
        stoker("plan", str(site), f"{tmp_path}/mine.py:score", "--inputs", "100", "--json").output
    )
    assert told["as_written"]["finish_s"]["p50"] == pytest.approx(30 + 50 * 4, rel=0.5)


@pytest.mark.parametrize(
    ("app", "says"),
    [
        ("{folder}/gone.py:score", "cannot be read: No such file or directory"),
        ("{folder}/fine.py:nothing", "cannot be planned: .* it has no function nothing"),
        ("{folder}/fine.py:score", "no function like score of .*fine.py was measured yet"),
    ],
)
def test_missing_estimate_reports_its_reason(stoker: Stoker, site: str, tmp_path: Path, app: str, says: str):
    pytest.importorskip("numpy", reason="similar recipes are found with it")
    estimating.open_history.cache_clear()
    (tmp_path / "broken.py").write_bytes(b"def score(:\n\xff\x00")
    (tmp_path / "fine.py").write_text(
        PROGRAM.format(comment="", context='model("small")', assigned="") + "\ndef more(): 1\n"
    )
    shown = stoker("plan", site, app.format(folder=tmp_path), "--inputs", "10")
    assert isinstance(shown.exception, ConfigError)
    assert re.search(says, str(shown.exception)), shown.exception
