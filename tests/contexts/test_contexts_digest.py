from __future__ import annotations

import ast
import importlib
import os
import sys
import textwrap
from collections import OrderedDict
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from new_process import run_python

from stoker.contexts import payloads, user_code
from stoker.contexts.digest import digest_of
from stoker.contexts.factory import recipe_of
from stoker.errors import RecipeError

LOADER = """
import dataclasses, enum, functools, math, textwrap
import helpers
from helpers import scale
NAMES = {"b", "a", "c", "d"}
TABLE = {"x": 1, "y": (2.5, None)}

class Kind(enum.Enum):
    ONE = 1
    TWO = "two"

@dataclasses.dataclass
class Settings:
    size: int = 3
    name: str = "n"
    def area(self):
        return self.size ** 2
    @functools.cached_property
    def half(self):
        return self.size / 2

@functools.cache
def cached(n):
    return n if n < 1 else cached(n - 1)

@functools.singledispatch
def show(x):
    return "any"

@show.register
def _(x: int):
    return x + 5

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def make(bias):
    def loader(path, *, n=3, kind=Kind.ONE):
        def inner(x):
            return math.sqrt(x) * bias + scale(x) + helpers.offset()
        if path in NAMES or "z" in {"q", "r", "s", "t"}:
            return TABLE
        return inner(n), Settings().half, even(n), cached(n), show(n), textwrap.dedent(path), [k for k in Kind]
    return loader

loader = make(2)
"""
HELPERS = """
STEP = 4
def scale(x):
    return x * STEP
def offset():
    return 1
"""
SHOW = """
from stoker.contexts.digest import digest_of
parts = loader, ["models/x"], {"n": 3, "z": Settings(5)}
digest = digest_of(*parts)
loader("x")
assert digest_of(*parts) == digest, "calls and pickles fill only caches"
print(digest)
"""


FORKS = """
import os, runpy, sys
import stoker.contexts.digest
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path[0] = folder
        runpy.run_path("program.py", run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def program(folder: Path, *, loader: str = LOADER, helpers: str = HELPERS, module: bool = False) -> Path:
    """Return the folder of a program that prints the digest of a loader in `__main__` or in a module."""
    folder.mkdir()
    (folder / "helpers.py").write_text(helpers)
    if module:
        (folder / "mine.py").write_text(loader)
        loader = "from mine import *\nfrom mine import loader, Settings\n"
    (folder / "program.py").write_text(loader + SHOW)
    return folder


def digests(*programs: Path, seed: str = "0") -> list[str]:
    """Return the digests that the programs print, each in a fork of one process."""
    found = run_python(FORKS, *programs, env={**os.environ, "PYTHONHASHSEED": seed}).split()
    assert len(found) == len(programs)
    return found


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digests(program(tmp_path_factory.mktemp("original") / "a"))[0]


def test_digest_is_equal_in_other_processes_and_from_a_module(original: str, tmp_path: Path) -> None:
    moved = "# a comment\n\n\n" + LOADER.replace("def even", "# one\n\ndef even")
    programs = [
        program(tmp_path / "b"), program(tmp_path / "c", module=True),
        program(tmp_path / "d", loader=moved, helpers="# another\n" + HELPERS),
    ]  # fmt: skip
    for seed in ("1", "4242"):
        assert digests(*programs, seed=seed) == [original] * 3


CHANGES = [
    ("make(2)", "make(3)"),  # a value in the closure of the loader
    ("n=3, kind", "n=4, kind"),  # a default
    ('"y": (2.5', '"y": (2.75'),  # a global that the loader reads
    ("n == 0 or", "n == 1 or"),  # a function that the loader calls
    ("self.size ** 2", "self.size ** 3"),  # a method of a class that the loader uses
    ("self.size / 2", "self.size / 3"),  # a cached property
    ("n < 1 else", "n < 2 else"),  # a cached function
    ("x + 5", "x + 6"),  # an implementation of a generic function
    ("ONE = 1", "ONE = 11"),  # a member of an enum
    ("math.sqrt", "math.cbrt"),  # a name in nested code
    ('{"q", "r"', '{"q", "rr"'),  # a constant set
    ('NAMES = {"b"', 'NAMES = {"bb"'),
    ("STEP = 4", "STEP = 5"),  # a constant of a helper module
    ("x * STEP", "x + STEP"),
    ("return 1", "return 2"),
]


def test_digest_changes_with_the_code(original: str, tmp_path: Path) -> None:
    programs = []
    for number, change in enumerate(CHANGES):
        assert (change[0] in LOADER) != (change[0] in HELPERS)
        texts = {"loader": LOADER.replace(*change), "helpers": HELPERS.replace(*change)}
        programs.append(program(tmp_path / str(number), **texts))
    found = zip(CHANGES, digests(*programs), strict=True)
    assert [change for change, digest in found if digest == original] == []


class Key:
    def __init__(self, number: int) -> None:
        self.number = number


def test_weak_containers_are_digested_by_their_contents() -> None:
    one, again, two = Key(1), Key(1), Key(2)
    for make in (lambda key: WeakSet([key]), lambda key: WeakKeyDictionary({key: 1})):
        assert digest_of(make(one)) == digest_of(make(again)) != digest_of(make(two))


keys = st.text(max_size=3) | st.integers() | st.booleans()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(keys, inner, max_size=3) | st.frozensets(st.integers() | st.text(), max_size=4),
    max_leaves=12,
)  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """True if values and types are equal: 1, 1.0 and True differ; -0.0 and 0.0 differ. The dict key order counts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, frozenset):
        return {(type(item), item) for item in one} == {(type(item), item) for item in other}
    return one == other and repr(one) == repr(other)


@given(values, values)
def test_values_have_equal_digests_only_if_they_are_equal(one: Any, other: Any) -> None:
    assert (digest_of(one) == digest_of(other)) == same(one, other)
    assert digest_of(payloads.loads(payloads.dumps(one))) == digest_of(one)


def test_digest_depends_on_the_boundaries_between_values() -> None:
    several = (("ab", "c"), ("a", "bc"), (("a", "b"), "c"), ("abc",), (["ab", "c"],), ({"ab": "c"},))
    seen = [digest_of(*parts) for parts in several]
    assert len(set(seen)) == len(seen)


def test_digest_ignores_keyword_order_but_not_dict_order() -> None:
    def loader(labels: object = None, *, depth: int = 0, width: int = 0) -> object:
        return labels, depth, width

    assert recipe_of(loader, (), {"depth": 1, "width": 2}).key == recipe_of(loader, (), {"width": 2, "depth": 1}).key
    labels = [{"true": 1, "false": 0}, {"false": 0, "true": 1}]
    assert len({recipe_of(loader, (each,)).key for each in labels}) == 2
    assert digest_of(OrderedDict(labels[0])) != digest_of(OrderedDict(labels[1]))


NESTED = {
    "outer/__init__.py": "from outer import inner\n",
    "outer/inner.py": "import threading\nRATE = 1\nUNUSED = 1\nLOCK = threading.Lock()\nTABLE = {'a': 1}\n"
    "class Settings:\n    rate = 1\ndef look():\n    return TABLE['a']\n",
}


def test_value_set_in_a_module_used_by_a_loader_is_in_the_digest(tmp_path: Path) -> None:
    for name, text in NESTED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    outer = importlib.import_module("outer")
    used = ("RATE", "Settings.rate", "look()", "LOCK", "outer")
    code = f"def f():\n return {', '.join(f'outer.inner.{name}' for name in used)}\n"
    loader = FunctionType(compile(code, "f", "exec").co_consts[0], {"outer": outer, "__name__": "__main__"}, "f")
    seen = [digest_of(loader)]
    outer.inner.UNUSED = 2
    seen.append(digest_of(loader))
    outer.inner.RATE = 2
    seen.append(digest_of(loader))
    outer.inner.Settings.rate = 2
    seen.append(digest_of(loader))
    outer.inner.TABLE["a"] = 2
    seen.append(digest_of(loader))
    sys.path.remove(str(tmp_path))
    del sys.modules["outer"], sys.modules["outer.inner"]
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


class Measured(numpy.ndarray):
    unit = ""


def test_arrays_are_digested_by_class_and_content() -> None:
    plain = numpy.arange(3.0).reshape(1, 3)
    metres, miles = plain.view(Measured), plain.view(Measured)
    masked = [numpy.ma.array([1, 2, 3], mask=mask) for mask in ([0, 0, 1], [0, 1, 0])]
    different = (plain, metres, *masked, plain.reshape(3), plain.astype("f4"), plain + 1)
    assert len({digest_of(each) for each in different}) == len(different)
    assert digest_of(metres) == digest_of(miles)


def test_containers_that_contain_themselves_are_digested() -> None:
    one: list[Any] = [1]
    one.append(one)
    other: list[Any] = [1]
    other.append(other)
    assert digest_of(one) == digest_of(other)
    assert digest_of(one) != digest_of([1, [1]])


def test_error_names_an_object_that_cannot_be_digested() -> None:
    import threading

    lock = threading.Lock()

    def loader() -> None:
        lock.acquire()

    with pytest.raises(RecipeError, match=r"variable 'lock' of loader.*lock"):
        digest_of(loader)


def test_installed_functions_are_digested_by_name() -> None:
    assert digest_of(textwrap.dedent) == digest_of(textwrap.dedent)
    assert digest_of(textwrap.dedent) != digest_of(textwrap.indent)


VALUES = """
import re, sys
from stoker.contexts.digest import digest_of
import torch
torch.manual_seed(0)
base = torch.arange(10.0)
values = {
    "pattern": re.compile("a+"), "tensor": torch.ones(3), "other": torch.ones(3) + 1,
    "bfloat16": torch.ones(2, 3, dtype=torch.bfloat16),
    "view": base[2:5], "turned": base.reshape(2, 5).T, "one": torch.tensor(3), "none": torch.zeros(0, 3),
    "conj": torch.full((3,), 1j).conj(), "parameter": torch.nn.Parameter(torch.ones(3)), "bool": torch.tensor([True]),
    "sparse": torch.eye(3).to_sparse(), "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "storage": torch.ones(3).untyped_storage(), "module": torch.nn.Linear(2, 2), "meta": torch.empty(3, device="meta"),
}
values = {name: digest_of(value) for name, value in values.items()}
print(values)
"""


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*deprecated")
def test_tensors_and_patterns_have_one_digest_in_all_processes() -> None:
    """Pickles of tensors and patterns contain memory addresses or use `copyreg`."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    there = run_python(VALUES)
    here: dict[str, Any] = {}
    exec(VALUES, here)
    assert ast.literal_eval(there) == here["values"]
    assert len(set(here["values"].values())) == len(here["values"]) == 16


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_digest_works_while_numpy_or_torch_is_half_imported(monkeypatch, name):
    monkeypatch.setattr(user_code, "_installed_modules", {})  # use a separate cache of module facts in this test
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert digest_of(OrderedDict(a=range(3))) == digest_of(OrderedDict(a=range(3)))
