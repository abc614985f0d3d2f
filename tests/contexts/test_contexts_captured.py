from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import pytest

from stoker.contexts.factory import find_rebound_name_in_loader
from stoker.contexts.function_code import CapturedObjects
from stoker.contexts.recipe import Recipe


def namespace(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec", dont_inherit=True), names)
    return names


IMMUTABLE = [
    ("scale = 1\ndef use(): return scale", "scale = 2", "scale"),
    ("scale = 0.0\ndef use(): return scale", "scale = -0.0", "scale"),
    ("def use(): return scale", "scale = 2", "scale"),
    ("scale = 1\ndef use(): return scale", "del scale", "scale"),
    ("scale = (1, ('a', b''))\ndef use(): return scale", "scale = (1, ('a', b'c'))", "scale"),
    ("scale = 1\ndef helper(): return scale\ndef use(): return helper()", "scale = 2", "scale"),
    ("def helper(): return 1\ndef use(): return helper()", "def helper(): return 2", "helper"),
    ("def helper(): return 1\ndef use(): return helper()", "helper.__code__ = (lambda: 2).__code__", "helper"),
    ("def use(): return 1", "use.__code__ = (lambda: 2).__code__", "use"),
    ("def use(x=1, y=2): return y", "use.__defaults__ = (1, 3)", "a default of use"),
    ("def use(*, rate=1): return rate", "use.__kwdefaults__['rate'] = 2", "rate"),
    ("def use(): return use.rate\nuse.rate = 1", "use.rate = 2", "rate"),
    ("def use(): return use.rate", "use.rate = 2", "use"),
    ("def use(x: int): return x", "use.__annotations__['x'] = float", "use"),
    ("from typing import *\ndef use(a: Optional[int], b: dict[str, list[int]], c: 'int | None', d: int | None,"
     " e: Callable[[int], str], f: Literal['x'], g: Any, h: List[int]) -> None: pass",
     "use.__annotations__['a'] = float", "use"),
    ("def make(n):\n def use(): return n\n return use\nuse = make(1)",
     "use.__closure__[0].cell_contents = 2", "n"),
    ("rate = 1\ndef one(): return two()\ndef two(): return one(), rate\ndef use(): return one()", "rate = 2", "rate"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "change", "name"), IMMUTABLE)
def test_immutable_captures_are_compared_by_identity(source: str, change: str, name: str) -> None:
    names = namespace(source)
    use = names["use"]
    captured = CapturedObjects(use)
    assert captured.mutable_objects == {}
    exec("unused = 1", names)
    assert captured.find_rebound_name() == ""
    exec(change, names)
    assert captured.find_rebound_name() == name
    assert CapturedObjects(use).find_rebound_name() == ""


MUTABLE = [
    "held = [1]",
    "held = {'a': 1}",
    "class held: rate = 1",
    "class C: rate = 1\nheld = C()",
    "import array\nheld = array.array('d', [1])",
    "held = {}.get",
    "import functools\n@functools.cache\ndef held(): return 1",
]


USE = "\ndef use(): return held"
USE_THROUGH_HELPER = "\ndef helper(): return held\ndef use(): return helper()"


@pytest.mark.parametrize(
    "source",
    [
        *(source + use for source in MUTABLE for use in (USE, USE_THROUGH_HELPER)),
        "def use(x, items=[]): return items",
        "def use(*, items=[]): return items",
        "def use(): return use.rates\nuse.rates = []",
        "class C: pass\ndef use(x: C): return x",
        "class C: pass\ndef use(x: dict[str, list[C]]): return x",
        "def make(held):\n def use(): return held\n return use\nuse = make([])",
        "import functools\nuse = functools.partial(print, [])",
        "class C:\n def run(self): pass\nuse = C().run",
        "class use: pass",
    ],
)
def test_captured_object_that_may_change_counts_as_mutable(source: str) -> None:
    assert CapturedObjects(namespace(source)["use"]).mutable_objects


FUNCTION = "rate = 1\ndef helper(x=0): return rate\n"
CLASS = "rate = 1\nclass M:\n def run(self): return rate\n"

HOLDERS = {
    "a dict": FUNCTION + "held = {'a': helper}",
    "a list in a tuple": FUNCTION + "held = ([helper],)",
    "a defaultdict's factory": "import collections\nrate = 1\nheld = collections.defaultdict(lambda: rate)",
    "a partial": FUNCTION + "import functools\nheld = functools.partial(helper, 1)",
    "a bound method": CLASS + "held = M().run",
    "a class": CLASS + "held = M",
    "an instance": CLASS + "held = M()",
    "a metaclass": "rate = 1\nclass Meta(type):\n def run(cls): return rate\nclass M(metaclass=Meta): pass\nheld = M",
    "the value of an enum's member": (
        "import enum, functools\nrate = 1\nclass Op(enum.Enum): A = functools.partial(lambda: rate)\nheld = Op.A"
    ),
    "a cached function": "import functools\nrate = 1\n@functools.lru_cache\ndef held(): return rate",
    "an app in a dict": "import stoker\nrate = 1\n@stoker.app\ndef helper(): return rate\nheld = {'a': helper}",
    "a decorator's wrapper": (
        "import functools\nrate = 1\ndef deco(f):\n @functools.wraps(f)\n def call(): return f() * rate\n return call\n"
        "@deco\ndef held(): return 1"
    ),
    "a decorator's wrapper of an installed function": (
        "import functools, shlex\nrate = 1\ndef around(f):\n @functools.wraps(f)\n def call(x): return f(x) * rate\n"
        " return call\nheld = around(shlex.split)"
    ),
    "a context manager of contextlib": (
        "import contextlib\nrate = 1\n@contextlib.contextmanager\ndef held(): yield rate"
    ),
    "a closure of an installed module": (
        "import functools\nrate = 1\n@functools.singledispatch\ndef x(x): return rate\nheld = x.dispatch\ndel x"
    ),
    "functions that hold each other": (
        "rate = 1\ndef one(): return TABLE['two']()\ndef two(): return TABLE['one'](), rate\n"
        "TABLE = {'one': one, 'two': two}\nheld = [TABLE]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_change_inside_a_captured_function_is_never_missed(holder: str) -> None:
    names = namespace(holder + USE)
    use = names["use"]
    captured = CapturedObjects(use)
    names["rate"] = 2
    assert captured.mutable_objects or captured.find_rebound_name()


def test_captured_user_module_counts_as_mutable(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("stoker_test_settings")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = namespace("def use(): return settings.rate")
    names["settings"] = module
    assert list(CapturedObjects(names["use"]).mutable_objects) == ["settings"]


def test_comparison_runs_no_code_of_the_user() -> None:
    never = "def never(*_): raise SystemExit('code of the user ran')\n"
    names = namespace(
        never
        + "class Meta(type): __getattribute__ = __hash__ = __eq__ = __subclasscheck__ = __instancecheck__ = never\n"
        "class M(metaclass=Meta):\n"
        " __getattribute__ = __hash__ = __eq__ = __bool__ = __len__ = __iter__ = __call__ = __reduce_ex__ = never\n"
        "held, kind = M(), M\ndef use(): return held, kind"
    )
    captured = CapturedObjects(names["use"])
    assert list(captured.mutable_objects) == ["held", "kind"]
    assert captured.find_rebound_name() == ""


def test_function_referenced_by_its_helpers_is_freed() -> None:
    names = namespace(
        "def make():\n def helper(): return use()\n def use(f=helper): return helper, use\n use.me = use\n"
        " return use\nuse = make()"
    )
    use = names.pop("use")
    captured = CapturedObjects(use)
    assert captured.mutable_objects == {}
    gone = weakref.ref(use)
    del use
    gc.collect()
    assert gone() is None


def test_rebound_name_of_a_loader_is_found_from_its_recipe() -> None:
    names = namespace("import stoker\nsettings = {'layers': [1]}\n@stoker.context\ndef table(): return settings\n")
    recipe = names["table"]()
    assert isinstance(recipe, Recipe)
    assert find_rebound_name_in_loader(recipe.key) == ""
    exec("settings = {'layers': [2]}", names)
    assert find_rebound_name_in_loader(recipe.key) == "settings"
    assert find_rebound_name_in_loader(names["table"]().key) == ""
