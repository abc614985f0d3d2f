"""A wrong option of the Python API raises a declared error that names the option."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import pytest

import stoker
from stoker.contexts.factory import recipe_of
from stoker.contexts.recipe import ContextOptions
from stoker.errors import ConfigError, RecipeError, StokerError
from stoker.manager.executor.apps import OPTIONS
from stoker.manager.executor.options import KEYS, parse_call_specification
from stoker.manager.executor.session import Session
from stoker.site import Policy, ProvisioningName, Site


def load_model(path="m"):
    return path


def echo(number, mark="!"):
    return number, mark


MODEL = stoker.context(load_model)()

APP: dict[str, list[Any]] = {
    "context": [3, load_model, stoker.context(load_model), "llm"],
    "batch_size": [0, -1, "8", True, 1.5],
    "timeout": ["soon", "4", -1, 0, math.nan, math.inf, [1], True, "9" * 400 + " s"],
    "priority": ["high", 1.5, True, 10**30],
    "deadline": ["soon", "4", -1, 0, math.inf, True, 9e9],
    "late": ["later", 3, ["drop"], "drop"],  # the last value has no effect without a deadline
    "latency": [-1, "1", math.inf, "soon", True],
    "ttft": [0, "0 s", -1, "1", math.inf, "soon", True],
    "tpot": [0, -1, "1", math.inf, "soon", True],
    "gang": [0, -1, (2, 1), (1, 2, 3), "2", True, 10**30, (1, 10**30)],
    "features": [3, "items", {"itms": 1}, {"items": "many"}, {"items": -1}, {"kind": 3}, {"fixed_s": math.inf}],
    "variants": [3, MODEL, "llm", [3], [load_model], 0],
    "stream": ["no", 1],
    "cache": ["no", 1],
    "ignore_for_cache": [3, [3], ["mark"]],  # the last value has no effect without cache=True
    "executors": [3, [3], []],
}
CONTEXT: dict[str, list[Any]] = {
    "memory": ["4", "4 gigs", -1, math.nan, math.inf, [1], True, 10**30],
    "device_memory": ["4", -1, "x" * 200],
    "disk": ["lots", -1],
    "devices": [0, -1, "2", True, 10**30],
    "kinds": [3, [3], [""]],
    "slots": [0, "2", True, 10**30],
    "load_limit": [0, "0 s", "30", -1, math.inf, math.nan, [1]],
    "files": [3, (1,), [""], [b"m"]],
    "preload": [3, [3], [""]],
    "awareness": ["half", 3, [], None],
    "calls_per_library": [-1, "1", True, 10**30],
    "min_libraries": [-1, "1", True, 10**30],
    "max_libraries": [0, -1, "1", True, 10**30],
    "keep_alive": [-1, "soon", math.nan, 10**30],
}
MAP: dict[str, list[Any]] = {
    "function": [3, "echo", None],
    "items": [3, None],
    "batch_size": [0, "8", True, 1.5],
    "ordered": ["no", 0, None],
    "progress": [3, "yes", None],
    "window": [0, -1, "many", True],
    "return_exceptions": ["no", 1],
    "keep": [3, "", True],
    "reuse": ["no", 1, None],
}
EXECUTOR: dict[str, list[Any]] = {
    "site": ["", 3],
    "session": ["", 3],
    "provider": ["slurm", 3],
    "label": ["", 3, "a/b"],
    "working_dir": ["", 3],
    "drain_s": ["5 s", -1, math.nan, True],
    "progress": ["no", 1],
    "storage_access": [3, [3], "scp"],
    "block_error_handler": ["no", 3],
    "remote_monitoring_radio": ["udp", 3],
}
LOAD: dict[str, list[Any]] = {
    **{name: EXECUTOR[name] for name in ("site", "session", "provider", "label", "working_dir", "drain_s", "progress")},
    "run_dir": ["", 3, None],
    "retries": [-1, "2", True, None],
    # options of Parsl's executors
    "strategy": ["nope", 3],
    "max_idletime": ["2 min"],
    "usage_tracking": [9],
    "exit_mode": ["quick"],
    "internal_tasks_max_threads": [0],
    "initialize_logging": ["no"],
}
SPECIFICATION: dict[str, list[Any]] = {
    "context": APP["context"],
    "priority": APP["priority"],
    "timeout_s": APP["timeout"],
    "deadline_s": APP["deadline"],
    "late": APP["late"],
    "latency_s": [-1, "1", math.inf],
    "ttft_s": [-1, "1"],
    "ttft_per_token_s": [-1, "1"],
    "ttft_most_s": [-1, "1", 8],  # the value 8 has no effect without ttft_per_token_s
    "tpot_s": [-1, "1"],
    "features": APP["features"],
    "variants": APP["variants"],
    "gang": APP["gang"],
    "stream": APP["stream"],
}


def refuse_each(call: Callable[..., Any], option: str, values: list[Any]) -> None:
    """Check that each value raises a declared error that names the option."""
    for value in values:
        with pytest.raises(StokerError) as caught:
            call(**{option: value})
        said = str(caught.value)
        assert option in said, (value, said)
        assert not any(word in said for word in ("$", "_bytes", "limit_s")), (
            f"the error mentions the message format: {said}"
        )
        assert "was called before a site was loaded" not in said
        assert len(said) < 700, said


@pytest.fixture(autouse=True)
def no_session_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_SESSION", raising=False)


def app(**given: Any) -> Any:
    return stoker.app(**given)(echo)


def context(**given: Any) -> Any:
    return stoker.context(**given)(load_model)()


def map_(function: Any = echo, items: Any = (1,), **given: Any) -> Any:
    return stoker.map(function, items, **given)


def specification(**given: Any) -> Any:
    return parse_call_specification(given)


def warm(context: Any = MODEL, count: Any = 1) -> Any:
    return object.__new__(Session).warm(context, count)  # options are checked before the session is used


WARM = {"context": [load_model], "count": [0, -1, "2", True, 1.5, 10**30]}
CALLS: list[tuple[Callable[..., Any], dict[str, list[Any]]]] = [
    (app, APP), (context, CONTEXT), (map_, MAP), (stoker.StokerExecutor, EXECUTOR), (stoker.load, LOAD),
    (specification, SPECIFICATION), (warm, WARM),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "option", "values"),
    [
        pytest.param(call, option, values, id=f"{call.__name__}-{option}")
        for call, table in CALLS
        for option, values in table.items()
    ],
)
def test_wrong_option_value_is_refused_by_name(call: Callable[..., Any], option: str, values: list[Any]) -> None:
    refuse_each(call, option, values)


def test_explain_refuses_a_subject_that_is_not_a_name() -> None:
    with pytest.raises(ConfigError, match=r"session\.explain"):
        object.__new__(Session).explain(3)  # type: ignore[arg-type]


def parameters(function: Callable[..., Any]) -> set[str]:
    taken = inspect.signature(function).parameters.values()
    return {each.name for each in taken if each.kind is not each.VAR_KEYWORD} - {"self"}


@pytest.mark.parametrize(
    ("table", "real"),
    [
        (APP, set(OPTIONS)),
        (CONTEXT, parameters(ContextOptions)),
        (MAP, parameters(stoker.map)),
        (EXECUTOR, parameters(stoker.StokerExecutor)),
        (SPECIFICATION, set(KEYS)),
    ],
    ids=["app", "context", "map", "executor", "specification"],
)
def test_refusal_tests_cover_every_public_option(table: dict[str, list[Any]], real: set[str]) -> None:
    assert set(table) == real
    assert parameters(stoker.load) <= set(LOAD)


@pytest.mark.parametrize(
    ("function", "option", "error", "said"),
    [
        (stoker.app, "retries", ConfigError, r"@stoker.app has no option retries; .*: stoker.load\(retries=2\)"),
        (stoker.app, "priorty", ConfigError, "@stoker.app has no option priorty; did you mean priority"),
        (stoker.load, "retrys", ConfigError, r"stoker\.load has no option retrys; did you mean retries"),
        (stoker.context, "memry", RecipeError, "@context has no option 'memry'; did you mean memory"),
    ],
)
def test_an_unknown_option_is_refused(
    function: Callable[..., Any], option: str, error: type[StokerError], said: str
) -> None:
    with pytest.raises(error, match=said):
        function(**{option: 1})


def test_empty_session_name_is_refused_at_load() -> None:
    with pytest.raises(
        ConfigError, match=r"session: '' names no session .*not set.*stoker sessions.*leave session= out"
    ):
        stoker.load(session=os.environ.get("NO_SUCH_VARIABLE", ""))


def one_by_one(path="m"):
    yield path


async def one_by_one_later(path="m"):
    yield path


async def later(path="m"):
    return path


class Many:
    def __call__(self, path="m"):
        yield path

    def each(self, path="m"):
        yield path

    async def later(self, path="m"):
        return path


YIELD = [one_by_one, one_by_one_later, functools.partial(one_by_one, "n"), Many(), Many().each]
MANAGE = [contextlib.contextmanager(one_by_one), contextlib.asynccontextmanager(one_by_one_later)]


@pytest.mark.parametrize("function", MANAGE, ids=lambda function: str(function.__name__))
def test_context_manager_is_refused_as_an_app(function: Any) -> None:
    for decorate in (stoker.app, stoker.app(context=MODEL)):
        with pytest.raises(ConfigError, match="is a context manager"):
            decorate(function)


@pytest.mark.parametrize("function", YIELD, ids=lambda function: str(getattr(function, "__name__", type(function))))
def test_generator_app_streams_unless_stream_is_false(function: Any) -> None:
    assert stoker.app(function).specification.requirements.options.stream
    assert not stoker.app(stream=False)(function).specification.requirements.options.stream
    assert stoker.app(stream=True)(echo).specification.requirements.options.stream
    assert not stoker.app(echo).specification.requirements.options.stream
    with pytest.raises(ConfigError, match="yields its result in pieces, which calls of a gang cannot"):
        stoker.app(gang=2)(function)
    assert stoker.app(gang=2, stream=False)(function).specification.requirements.options.gang == (2, 2)


@pytest.mark.parametrize(
    "function", [*YIELD, *MANAGE], ids=lambda function: str(getattr(function, "__name__", type(function)))
)
def test_generator_function_is_not_accepted_as_a_loader(function: Any) -> None:
    said = r"is a (generator function|context manager)"
    for make in (stoker.context, stoker.context(memory="1 GB"), recipe_of):
        with pytest.raises(RecipeError, match=said):
            make(function)


@pytest.mark.parametrize("loader", [later, functools.partial(later, "n"), Many().later])
def test_async_function_is_accepted_as_an_app_and_not_as_a_loader(loader: Any) -> None:
    assert "later" in repr(stoker.app(loader))
    for make in (stoker.context, recipe_of):
        with pytest.raises(RecipeError, match=r"later is an async function; a loader .* asyncio\.run"):
            make(loader)


@pytest.mark.parametrize("function", [int, max, dict, range])
def test_callable_without_a_signature_is_refused_as_an_app(function: Any) -> None:
    with pytest.raises(ConfigError, match=f"Python finds no signature of {function.__name__}"):
        stoker.app(function)


def test_app_has_the_name_of_its_function() -> None:
    for app, name in ((stoker.app(functools.partial(echo, 1)), "echo"), (stoker.app(len), "len")):
        assert (repr(app), app.__name__) == (f"<app {name}: no context>", name)


def test_argument_ignored_for_the_cache_must_be_a_parameter() -> None:
    with pytest.raises(
        ConfigError, match=r"echo: ignore_for_cache: 'nope' is not one of its parameters \(number, mark\)"
    ):
        stoker.app(cache=True, ignore_for_cache=["nope"])(echo)
    assert stoker.app(cache=True, ignore_for_cache=["nope"])(lambda **given: given)


def test_demand_provisioning_is_refused_if_parsl_starts_the_blocks() -> None:
    with pytest.raises(ConfigError, match=r"provisioning = \"demand\" has no effect in a program"):
        stoker.StokerExecutor(Site(policy=Policy(provisioning=ProvisioningName.DEMAND)))
