from __future__ import annotations

import functools
import gc
import os
import pickle
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from parsl import python_app
from parsl.dataflow.memoization import id_for_memo
from parsl.executors.errors import InvalidResourceSpecification
from parsl.jobs.states import JobState, JobStatus

import stoker
from stoker import errors
from stoker.contexts import payloads
from stoker.contexts.recipe import ObjectRef
from stoker.manager.executor import blocks, executor, failures
from stoker.manager.executor.options import (
    CallRequirements,
    SpecificationError,
    parse_call_specification,
    read_parsl_spec,
)
from stoker.manager.executor.prepared import (
    AppSpecification,
    FunctionPreparer,
    inline_or_store_arguments,
    without_error_wrapper,
)
from stoker.manager.executor.session_files import LargeArgumentFiles
from stoker.protocol.calls import CallEnd, Failure, FailureKind, Features, OutputRange


def load_model(path, *, size=1):
    return {"model": (path, size)}


recipe = stoker.context(load_model)("a path")


def double(x):
    return 2 * x


# ---- specifications


def test_resource_specification_sets_every_supported_option():
    wants = parse_call_specification(
        {
            "context": recipe,
            "priority": 3,
            "timeout_s": "10 min",
            "deadline_s": 60,
            "latency_s": 1.5,
            "ttft_s": 0.2,
            "ttft_per_token_s": "2 ms",
            "ttft_most_s": 8,
            "tpot_s": "50 ms",
            "features": {"items": 4, "input_length": 100},
            "variants": [recipe],
            "gang": (2, 4),
            "stream": True,
        }
    )
    assert wants.recipe is recipe
    assert wants.features == Features(items=4, input_length=100)
    assert wants.deadline_s == 60
    options = wants.options
    assert (options.priority, options.limit_s, options.gang, options.stream) == (3, 600.0, (2, 4), True)
    assert (options.objective.latency_s, options.objective.ttft_s, options.objective.tpot_s) == (1.5, 0.2, 0.05)
    assert [options.objective.first_token_s(length) for length in (10, 1000, 9000)] == [0.2, 2.0, 8.0]
    assert options.variants == (recipe.key,)


def test_app_options_set_the_latency_objectives_of_its_calls():
    objective = stoker.app(ttft="300 ms", tpot=0.05, latency="2 s")(double).specification.requirements.options.objective
    assert (objective.ttft_s, objective.tpot_s, objective.latency_s) == (0.3, 0.05, 2.0)


def test_with_options_returns_a_new_app_of_the_same_function():
    made = stoker.app(context=recipe, priority=2, cache=True)(double)
    again = made.with_options(ttft="1 s", features={"input_length": 7})
    assert again.func is made.func
    wants, before = again.specification.requirements, made.specification.requirements
    assert (wants.options.objective.ttft_s, wants.options.priority, wants.recipe) == (1.0, 2, recipe)
    assert wants.features == Features(input_length=7)
    assert (before.options.objective.ttft_s, before.features) == (0.0, None)
    assert again.with_options(priority=3).specification.requirements.options.objective.ttft_s == 1.0
    with pytest.raises(SpecificationError, match=r"^ttft: 0 "):
        made.with_options(ttft=0)
    with pytest.raises(errors.ConfigError, match="has no option tftt; did you mean ttft"):
        made.with_options(tftt="1 s")


def test_deadline_counts_from_the_submission():
    def function() -> None: ...

    prepared = FunctionPreparer().prepare_function(function)
    wants, before = parse_call_specification({"deadline_s": 100}), time.monotonic()
    first = prepared.create_submission(function, wants)
    assert before + 100 <= first.due_at <= time.monotonic() + 100
    assert prepared.create_submission(function, wants).due_at > first.due_at
    assert prepared.create_submission(function, wants, due_at=7.0).due_at == 7.0, "a retried call"
    assert prepared.create_submission(function, parse_call_specification({})).due_at is None
    assert first.options.objective.deadline_at == 0, "only the manager uses its clock"


@pytest.mark.parametrize(
    ("specification", "words"),
    [
        ({"cores": 1}, ["cores", "priority", "timeout_s"]),
        ({"cores": 1, "memory": 1}, ["cores, memory are not keys"]),
        ({"prioritty": 1}, ["did you mean priority?"]),
    ],
)
def test_unknown_specification_key_is_refused_by_name(specification, words):
    with pytest.raises(SpecificationError) as caught:
        parse_call_specification(specification)
    assert isinstance(caught.value, InvalidResourceSpecification)
    assert isinstance(caught.value, errors.ConfigError)
    assert next(iter(specification)) in caught.value.invalid_keys
    for word in words:
        assert word in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.key == caught.value.key


def test_context_specification_of_the_parsl_paper_is_accepted():
    for context, arguments in (
        ([load_model, ["a path"], {}], {}),
        ([load_model, ["a path"]], {}),
        ((load_model, ("a path",), {"size": 2}), {"size": 2}),
    ):
        key = stoker.contexts.recipe_of(load_model, ("a path",), arguments).key
        assert read_parsl_spec({"context": context}).key == key
    for wrong in (None, {}, *({"context": wrong} for wrong in ([], load_model, ["path"], [load_model, "path"]))):
        with pytest.raises(SpecificationError, match="loader, "):
            read_parsl_spec(wrong)


def test_equal_parsl_specifications_share_a_context_recipe():
    preparer = FunctionPreparer()
    spec = {"context": [load_model, ["a"], {}]}
    first = preparer.parse_parsl_spec(spec)
    assert preparer.parse_parsl_spec({"context": [load_model, ["a"], {}]}) is first
    spec["context"][1][0] = "b"
    assert preparer.parse_parsl_spec(spec).recipe.key != first.recipe.key


# ---- packing


def test_pickled_function_is_cached_until_the_function_is_freed():
    preparer, plain = FunctionPreparer(), CallRequirements()

    def made():
        def local(x):
            return x

        return local

    def blob(function, *, takes_context=False):
        return preparer.prepare_function(function).current_blob(function, CallRequirements(takes_context=takes_context))

    local = made()
    first = blob(local)
    assert blob(local) is first
    assert blob(local, takes_context=True).key != first.key
    assert blob(made()).key == first.key, "an equal function has the same key"
    assert payloads.loads(first.blob)[0](7) == 7
    prepared = preparer.prepare_function(local)
    prepared.create_submission(local, plain)
    gone = weakref.ref(local)
    del local, prepared
    gc.collect()
    assert gone() is None


def _in_a_namespace(source):
    names = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), names)
    return names


def _key(preparer, function):
    return (
        preparer.prepare_function(function).create_submission(function, preparer.parse_specification({})).function.key
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("scale = 10", "scale = 11"),
        ("scale = [1, 2]", "scale.append(3)"),
        ("scale = {'a': {'b': [[0]]}}", "scale['a']['b'][0].append(1)"),
        ("scale = bytearray(5_000_000)", "scale[4_321_987] = 1"),
        ("import io; scale = io.BytesIO(b'abc')", "scale.write(b'x')"),
        ("import random; scale = random.Random(1)", "scale.random()"),
        ("scale = iter([1, 2])", "next(scale)"),
        ("def scale(): return 1", "def scale(): return 2"),
        ("def inner(): return 1\ndef scale(): return inner()", "def inner(): return 2"),
        ("pass", "scale = 3"),  # the first call raised a NameError
        ("class scale: size = 1", "class scale: size = 2"),
        ("scale = 1; import functools; times = functools.partial(max, ['a'])", "times.args[0].append('b')"),
        ("scale = 1; times = type('Made', (), {'rates': [1]})", "times.rates.append(2)"),
        (
            "class Scaler:\n    def __init__(self): self.rates = [1]\n    def __call__(self, x): return self.rates\n"
            "times = Scaler()",
            "times.rates.append(2)",
        ),
    ],
)
def test_function_is_sent_again_if_a_used_value_changed(before, after):
    names = _in_a_namespace(f"def times(x):\n    return x, scale\n{before}\n")
    preparer, times = FunctionPreparer(), names["times"]
    first = _key(preparer, times)
    if "iter(" not in before:  # the pickle of an iterator contains the remaining items
        assert _key(preparer, times) == first
    exec(compile(after, "<cell>", "exec"), names)
    second = _key(preparer, times)
    assert second != first


def test_changed_function_is_reported_with_and_without_a_context():
    replaced = []
    preparer = FunctionPreparer(on_replaced=lambda old, new: replaced.append((old, new)))
    names = _in_a_namespace("rows = [1]\ndef use():\n    return rows\n")
    prepared, ways = (
        preparer.prepare_function(names["use"]),
        [CallRequirements(takes_context=way) for way in (True, False)],
    )
    before = [prepared.current_blob(names["use"], wants).key for wants in ways]
    names["rows"].append(2)
    after = [prepared.current_blob(names["use"], wants).key for wants in ways]
    assert replaced == list(zip(before, after, strict=True))


def test_large_captured_value_is_reported_once(caplog):
    names = _in_a_namespace("small, table = [1], bytearray(2_000_000)\ndef use():\n    return small, table\n")
    preparer = FunctionPreparer()
    _key(preparer, names["use"])
    assert not caplog.records  # no warning is logged, because this may be the only call
    for _ in range(3):
        names["table"][5] += 1
        _key(preparer, names["use"])
    assert [record.getMessage().partition(", and sent")[0] for record in caplog.records] == [
        "use uses table, which may change: its 2.0 MB are pickled with every call"
    ]


def test_function_cache_detects_closure_changes_and_frees_closures():
    def make():
        count = 1

        def inner():
            return count, inner

        def bump():
            nonlocal count
            count += 1

        return inner, bump

    inner, bump = make()
    preparer = FunctionPreparer()
    first = _key(preparer, inner)
    bump()
    assert _key(preparer, inner) != first
    gone = weakref.ref(inner)
    del inner, bump
    gc.collect()
    assert gone() is None


def test_context_created_before_its_helper_changed_is_reported(caplog):
    names = _in_a_namespace(
        "import stoker\nsize = 1\n@stoker.context\ndef table():\n    return size\n"
        "@stoker.app(context=table())\ndef look(table):\n    return table\n"
    )
    preparer, look = FunctionPreparer(), names["look"]
    submission = preparer.prepare_function(look.func).create_submission(look.func, look.specification.requirements)
    assert not caplog.records
    names["size"] = 2
    assert (
        preparer.prepare_function(look.func).create_submission(look.func, look.specification.requirements).recipe
        == submission.recipe
    )
    preparer.prepare_function(look.func).create_submission(look.func, look.specification.requirements)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        f"context {submission.recipe.name} was made before size changed"
    ]
    assert names["table"]().key != submission.recipe.key


def test_only_the_wrapper_that_parsl_adds_is_removed():
    app = python_app(double)
    assert without_error_wrapper(app.func) is double

    @functools.wraps(double)
    def wrapper(x):
        return double(x) + 1

    assert without_error_wrapper(wrapper) is wrapper
    assert without_error_wrapper(len) is len


def test_unpicklable_value_is_named():
    lock = __import__("threading").Lock()
    with pytest.raises(errors.SerializationError, match=r"double: .*lock"):
        FunctionPreparer().prepare_function(double).pickle_arguments((1, lock), {}, by_name=frozenset())
    with pytest.raises(errors.SerializationError, match=r"function .*lambda"):
        _key(FunctionPreparer(), lambda: lock)


def test_last_call_that_uses_large_arguments_removes_their_file(tmp_path):
    def pack_arguments(args, kwargs, *, name, large):
        return inline_or_store_arguments(payloads.dumps_arguments((args, kwargs)), name=name, large=large)

    store = LargeArgumentFiles(tmp_path)
    data = os.urandom(1_200_000)
    small = pack_arguments(("x",), {}, name="f", large=store)
    assert payloads.loads(small) == (("x",), {})
    large = pack_arguments((data,), {}, name="f", large=store)
    assert isinstance(large, ObjectRef)
    assert pack_arguments((data,), {}, name="f", large=store) == large
    [file] = tmp_path.iterdir()
    assert payloads.loads(file.read_bytes()) == ((data,), {})
    assert file.stat().st_mode & 0o077 == 0
    other = LargeArgumentFiles(tmp_path)  # `other` imitates a second program
    others = pack_arguments((data,), {}, name="f", large=other)
    assert others.name == large.name
    store.release_file(large)
    assert file.exists()
    store.release_file(large)
    assert not file.exists()
    assert payloads.loads(Path(others.source).read_bytes()) == ((data,), {})
    other.release_file(others)
    assert list(tmp_path.iterdir()) == []
    gone = LargeArgumentFiles(tmp_path / "gone")
    with pytest.raises(errors.SerializationError, match=r"f: its arguments of 1\.2 MB cannot be written to .*gone"):
        pack_arguments((data,), {}, name="f", large=gone)


def test_file_of_a_large_result_is_removed_after_reading(tmp_path):
    array = np.arange(1_000_000)
    file = tmp_path / "result-1"
    file.write_bytes(payloads.dumps(array))
    ref = ObjectRef("result-1", file.stat().st_size, str(file))
    value = failures.result_or_raise(CallEnd(1, True, ref))
    assert np.array_equal(value, array)
    value[0] = 7
    assert not file.exists()
    with pytest.raises(errors.SerializationError, match=r"8.0 MB cannot be read.*run_dir"):
        failures.result_or_raise(CallEnd(1, True, ref))


def test_memoization_includes_the_context_and_not_the_priority():
    one = AppSpecification(parse_call_specification({"context": recipe, "priority": 1}))
    two = AppSpecification(parse_call_specification({"context": recipe, "priority": 2}))
    assert id_for_memo(one) == id_for_memo(two) != id_for_memo(AppSpecification(parse_call_specification({})))


# ---- ends


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_raises_an_error_with_its_facts(kind):
    failure = Failure(
        kind, "it went wrong", pilot="n014-0a1b", library=3, signal=9, exit_code=0, tail="last words", log="l"
    )
    with pytest.raises(errors.StokerError) as caught:
        failures.result_or_raise(CallEnd(7, False, b"", 0.0, failure))
    error = caught.value
    assert isinstance(error, errors.CallError | errors.SerializationError)
    assert (error.call, error.pilot, error.library, error.signal) == ("c-7", "n014-0a1b", "lib-3", 9)
    for word in ("c-7", "n014-0a1b", "it went wrong", "last words", "stoker explain c-7", "stoker logs "):
        assert word in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.facts) == (type(error), str(error), error.facts)


def test_infrastructure_error_has_the_last_exception_as_its_cause():
    data = payloads.dump_exception(OSError(5, "Input/output error"))
    failure = Failure(FailureKind.INFRASTRUCTURE, "failed it 3 times", pilot="n014-0a1b", device="cuda:1")
    end = CallEnd(7, False, data, 0.0, failure)
    assert not failures.can_unpickle_without_user_code(end), "the exception is the user's"
    with pytest.raises(errors.InfrastructureError, match="failed it 3 times") as caught:
        failures.result_or_raise(end)
    assert caught.value.device == "cuda:1"
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 5


def test_exit_in_a_call_does_not_end_the_program():
    data = payloads.dump_exception(SystemExit(3))
    with pytest.raises(errors.RemoteCallError, match=r"c-1 raised SystemExit\(3\)") as caught:
        failures.result_or_raise(CallEnd(1, False, data))
    assert caught.value.kind == "SystemExit"


def test_error_names_the_log_file_with_the_output_of_its_call():
    none_kept = "its output was not kept; its library's log, which other calls share: stoker logs lib-3"
    for printed, line in (
        (OutputRange("/l", 3, 9), "its output: stoker logs c-7"),
        (OutputRange("/l", 3, 3), none_kept),
        (None, none_kept),
    ):
        failure = Failure(FailureKind.POISON, "it died", pilot="n1", library=3, log="/l", printed=printed)
        with pytest.raises(errors.PoisonCallError) as caught:
            failures.result_or_raise(CallEnd(7, False, failure=failure))
        assert str(caught.value).splitlines()[-1] == f"  {line}"


def test_import_error_in_a_result_class_is_not_a_missing_module():
    class Raises:
        def __reduce__(self):
            return int, ("no number",)

    with pytest.raises(errors.SerializationError, match="no number") as caught:
        failures.result_or_raise(CallEnd(1, True, payloads.dumps(Raises())))
    assert "importable" not in str(caught.value)
    with pytest.raises(errors.SerializationError, match=r"c-1: its result .*must be importable"):
        failures.result_or_raise(CallEnd(1, True, b"\x80\x05cno_such_module_anywhere\nthing\n."))


def test_garbage_collection_thresholds_are_raised_during_a_session():
    before = gc.get_threshold()
    try:
        gc.set_threshold(701, 11, 12)
        assert executor.raise_gc_thresholds() == (701, 11, 12)
        assert gc.get_threshold() == executor.GC_THRESHOLDS
        gc.set_threshold(60_000)
        executor.raise_gc_thresholds()
        assert gc.get_threshold()[0] == 60_000, "a higher threshold is kept"
    finally:
        gc.set_threshold(*before)


def test_error_without_any_pilot_lists_the_reason_of_each_block():
    gone = JobStatus(JobState.FAILED, message="lost by the batch system")
    status = {
        "0": JobStatus(JobState.FAILED, exit_code=1, stderr_path=None),
        "1": JobStatus(JobState.FAILED, exit_code=1, stderr_path=None),
        "2": gone,
    }
    error = blocks.no_pilot_error(status, site="lab", log="/runs/submit_scripts")
    assert str(error).splitlines() == [
        "no pilot could be started on site lab",
        "  block 0, 1: exit code 1",
        "  block 2: lost by the batch system",
        "  fix the site file, or install the missing files on the node of the job, and load again",
        "  the scripts and their output: /runs/submit_scripts",
    ]
    assert error.log == "/runs/submit_scripts"
