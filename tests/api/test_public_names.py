from __future__ import annotations

import inspect
import pickle

import pytest
from parsl.dataflow.futures import AppFuture

import stoker
from stoker import errors
from stoker.manager.executor.futures import AppCallFuture


def test_stoker_exports_exactly_the_listed_names():
    assert sorted(stoker.__all__) == [
        "StokerError", "StokerExecutor", "__version__", "amap", "app", "causal_lm", "context", "device", "encoder",
        "encoder_family", "family", "gang", "kept", "load", "load_variable_from_serverless", "map", "progress",
        "scratch", "stream",
    ]  # fmt: skip
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None
    with pytest.raises(AttributeError, match="stoker"):
        stoker.no_such_name  # noqa: B018


def test_future_cannot_be_iterated():
    future = AppCallFuture.of(AppFuture({}))
    for loop in (list, iter, lambda one: [*one]):
        with pytest.raises(TypeError, match="a future is not iterable; loop over its result"):
            loop(future)


def test_app_decorator_works_without_parentheses_like_context():
    made = stoker.app(len)
    assert repr(made) == "<app len: no context>"
    assert made.function is len
    assert repr(stoker.context(len)).startswith("<context len")


def test_options_are_keyword_only():
    positional = {
        name: [
            p.name for p in inspect.signature(getattr(stoker, name)).parameters.values() if p.kind is not p.KEYWORD_ONLY
        ]
        for name in ("load", "map", "app", "StokerExecutor")
    }
    assert positional == {
        "load": ["site", "options"],
        "map": ["function", "items"],
        "app": ["function", "options"],
        "StokerExecutor": ["site", "label", "provider"],
    }


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StokerError)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_facts(kind):
    error = kind("what, where, what to do", call="c-1", tries=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "what, where, what to do"
    assert again.facts == {"call": "c-1", "tries": 3}
    assert again.call == "c-1"
    with pytest.raises(AttributeError, match="no fact 'nothing'"):
        again.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: stoker.app(7), "decorates a function"),
        (lambda: stoker.app(context=stoker.context(dict))(len), "context=dict"),
        (lambda: stoker.app(stoker.context(dict)()), "by name"),
        (lambda: stoker.app()(7), "7"),
        (lambda: stoker.app()(stoker.app()(len)), "one decorator"),
        (lambda: stoker.app(context=stoker.context(dict)())(lambda *, x: x), "first parameter"),
    ],
)
def test_invalid_use_of_the_app_decorator_is_refused(make, words):
    with pytest.raises(errors.StokerError, match=words):
        make()


def test_calls_before_a_site_is_loaded_raise_an_error_with_advice():
    app = stoker.app()(len)
    for call in (lambda: app("x"), lambda: stoker.map(len, ["x"])):
        with pytest.raises(errors.SessionError, match=r"with stoker\.load\(\)"):
            call()
