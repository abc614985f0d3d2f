"""The user's functions among the values of a function are found wherever they are, and what they use is compared."""

from __future__ import annotations

import pytest

from stoker.contexts.captured import CapturedState, changed_since_made

FUNCTION = "rate = 1\ndef helper(x=0): return rate\n"
CLASS = "rate = 1\nclass M:\n def run(self): return rate\n"
USE = "\ndef use(): return held"

HOLDERS = {
    "a dict": FUNCTION + "held = {'a': helper}",
    "a list in a tuple": FUNCTION + "held = ([helper],)",
    "a lambda in a dict": "rate = 1\nheld = {'a': lambda: rate}",
    "a lambda in a lambda": "rate = 1\nheld = [lambda: lambda: rate]",
    "a defaultdict's factory": "import collections\nrate = 1\nheld = collections.defaultdict(lambda: rate)",
    "an attribute": FUNCTION + "import types\nheld = types.SimpleNamespace(cb=helper)",
    "a slot": FUNCTION + "class Box: __slots__ = ('cb',)\nheld = Box()\nheld.cb = helper",
    "a partial in a list": FUNCTION + "import functools\nheld = [functools.partial(helper, 1)]",
    "a view of a dict": FUNCTION + "import types\nheld = types.MappingProxyType({'a': helper})",
    "a bound method": CLASS + "held = M().run",
    "a bound method in a list": CLASS + "held = [M().run]",
    "an instance in a list": CLASS + "held = [M()]",
    "a class in a dict": CLASS + "held = {'m': M}",
    "a base class": CLASS + "class Child(M): pass\nheld = [Child()]",
    "a class attribute": FUNCTION + "class Service: table = {'a': helper}\nheld = Service()",
    "a static method": "rate = 1\nclass M:\n @staticmethod\n def run(): return rate\nheld = [M]",
    "a class method": "rate = 1\nclass M:\n @classmethod\n def run(cls): return rate\nheld = [M]",
    "a property": "rate = 1\nclass M:\n @property\n def value(self): return rate\nheld = [M]",
    "a setter": "rate = 1\nclass M:\n def put(self, v): self.v = v * rate\n v = property(None, put)\nheld = [M]",
    "a partialmethod": (
        "import functools\nrate = 1\nclass M: run = functools.partialmethod(lambda self, x: rate, 1)\nheld = M()"
    ),
    "a cached property": (
        "import functools\nrate = 1\nclass M:\n @functools.cached_property\n def run(self): return rate\nheld = M"
    ),
    "a descriptor": (
        "rate = 1\nclass Field:\n def __init__(self, f): self.f = f\n def __get__(self, one, _): return self.f(one)\n"
        "class M:\n run = Field(lambda self: rate)\nheld = [M()]"
    ),
    "an operator that is a descriptor": (
        "rate = 1\nclass Field:\n def __init__(self, f): self.f = f\n def __get__(self, one, owner): return self.f\n"
        "class M:\n __call__ = Field(lambda: rate)\nheld = [M()]"
    ),
    "the making of instances": "rate = 1\nclass M:\n def __new__(cls): return rate\nheld = [M]",
    "a metaclass": "rate = 1\nclass Meta(type):\n def run(cls): return rate\nclass M(metaclass=Meta): pass\nheld = M",
    "a default factory of a dataclass": (
        "import dataclasses\nrate = 1\ndef make(): return [rate]\n@dataclasses.dataclass\nclass M:\n"
        " parts: list = dataclasses.field(default_factory=make)\nheld = [M]"
    ),
    "an enum's method": "import enum\nrate = 1\nclass Op(enum.Enum):\n A = 1\n def run(self): return rate\nheld = [Op]",
    "a method of an enum's member": (
        "import enum\nrate = 1\nclass Op(enum.Enum):\n A = 1\n def run(self): return rate\nheld = {'a': Op.A}"
    ),
    "the value of an enum's member": (
        "import enum, functools\nrate = 1\nclass Op(enum.Enum): A = functools.partial(lambda: rate)\nheld = {'a': Op.A}"
    ),
    "an app in a dict": "import stoker\nrate = 1\n@stoker.app\ndef helper(): return rate\nheld = {'a': helper}",
    "a cached function in a list": (
        "import functools\nrate = 1\n@functools.lru_cache\ndef helper(): return rate\nheld = [helper]"
    ),
    "under a decorator": (
        "import functools\ndef around(f):\n @functools.wraps(f)\n def call(): return f()\n return call\n"
        "rate = 1\n@around\ndef helper(): return rate\nheld = [helper]"
    ),
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
    "an implementation of a generic function": (
        "import functools\nrate = 1\n@functools.singledispatch\ndef held(x): return 1\n"
        "@held.register(int)\ndef other(x): return rate\ndel other"
    ),
    "a closure of an installed module": (
        "import functools\nrate = 1\n@functools.singledispatch\ndef x(x): return rate\nheld = x.dispatch\ndel x"
    ),
    "functions that hold each other": (
        "rate = 1\ndef one(): return TABLE['two']()\ndef two(): return TABLE['one'](), rate\n"
        "TABLE = {'one': one, 'two': two}\nheld = [TABLE]"
    ),
}  # fmt: skip


def namespace(source: str) -> dict:
    names = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), names)
    return names


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_what_a_held_function_uses_is_compared(holder):
    names = namespace(holder + USE)
    use = names["use"]
    captured = CapturedState(use)
    assert captured.changed(use) == ""
    names["rate"] = 2
    assert captured.changed(use) == "rate"
    assert CapturedState(use).changed(use) == ""


@pytest.mark.parametrize(
    "source",
    [
        FUNCTION + "def use(cb=helper): return cb()",
        FUNCTION + "def use(*, cb=helper): return cb()",
        FUNCTION + "def use(cb={'a': helper}): return cb",
        "rate = 1\ndef use(k=lambda: rate): return k()",
        FUNCTION + "def use(): return use.cb()\nuse.cb = helper",
        FUNCTION + "def make(held):\n def use(): return held\n return use\nuse = make([helper])",
        CLASS + "use = M().run",
        CLASS + "import functools\nuse = functools.partial(M.run, None)",
        "import functools\ndef around(f):\n @functools.wraps(f)\n def call(): return f() * rate\n return call\n"
        "rate = 1\n@around\ndef use(): return 1",
    ],
)
def test_defaults_attributes_and_the_function_itself_are_looked_into(source):
    names = namespace(source)
    use = names["use"]
    captured = CapturedState(use)
    assert captured.changed(use) == ""
    names["rate"] = 2
    assert captured.changed(use) == "rate"


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("import functools\n@functools.singledispatch\ndef held(x): return 1", "held(1); held('a')"),
        ("import functools\n@functools.lru_cache\ndef held(x): return 1", "held(1)"),
        ("import contextlib\n@contextlib.contextmanager\ndef held(): yield 1", "with held(): pass"),
        ("import dataclasses\n@dataclasses.dataclass\nclass held: a: int = 1", "repr(held()); held() == held(2)"),
        ("import enum\nclass Op(enum.Flag):\n A = 1\n B = 2\nheld = [Op]", "Op.A | Op.B"),
        ("import abc\nclass held(abc.ABC): pass", "isinstance(3, held)"),
        ("import shlex, bisect\nheld = {'a': shlex.split, 'b': bisect.bisect}", "shlex.marker = 1; del shlex.marker"),
    ],
    ids=["generic", "cached", "context manager", "dataclass", "flag", "abstract", "installed"],
)
def test_what_their_use_in_the_program_leaves_behind_is_no_change(source, change):
    names = namespace(source + USE)
    captured = CapturedState(names["use"])
    exec(change, names)
    assert captured.changed(names["use"]) == ""


def test_a_method_of_an_enum_that_is_replaced_is_seen():
    names = namespace("import enum\nclass Op(enum.Enum):\n A = 1\n def run(self): return 1\nheld = [Op]" + USE)
    captured = CapturedState(names["use"])
    exec("Op.run = lambda self: 2", names)
    assert captured.changed(names["use"]) == "run"


def test_a_generic_function_that_learns_another_type_is_seen():
    names = namespace("import functools\n@functools.singledispatch\ndef held(x): return 1" + USE)
    captured = CapturedState(names["use"])
    exec("held.register(int, lambda x: 2)", names)
    assert captured.changed(names["use"]) == "held"


def test_many_helpers_end():
    names = namespace("rates = list(range(2_000))\nheld = [(lambda i=i: rates[i]) for i in range(2_000)]" + USE)
    captured = CapturedState(names["use"])
    assert captured.changed(names["use"]) == ""
    names["rates"][0] = 1
    assert captured.changed(names["use"]) == "rates"


def test_many_large_values_of_many_helpers_end():
    source = "def make(rows): return lambda: rows\nheld = [make(list(range(1_000))) for _ in range(99)]"
    names = namespace(source + USE)
    captured = CapturedState(names["use"])
    assert captured.changed(names["use"]) == ""
    names["held"][0].__closure__[0].cell_contents[0] = 7
    assert captured.changed(names["use"]) == "rows"


def test_a_value_that_two_helpers_use_is_compared_once():
    names = namespace("rates = {'a': 1}\ndef one(): return rates\ndef two(): return rates\nheld = [one, two]" + USE)
    captured = CapturedState(names["use"])
    assert [binding.name for _, helper in captured._helpers for binding in helper._bindings] == ["rates"]


def test_no_code_of_the_user_runs_when_helpers_are_looked_for():
    never = "def never(*_): raise SystemExit('code of the user ran')\n"
    names = namespace(
        never + "rate = 1\n"
        "class Meta(type): __getattribute__ = __hash__ = __eq__ = __subclasscheck__ = __instancecheck__ = never\n"
        "class Field:\n def __init__(self, f): object.__setattr__(self, 'f', f)\n"
        " __get__ = __getattribute__ = __hash__ = __eq__ = never\n"
        "class M(metaclass=Meta):\n run = Field(lambda self: rate)\n shown = property(never)\n"
        " __getattribute__ = __hash__ = __eq__ = __bool__ = __len__ = __iter__ = __call__ = __reduce_ex__ = never\n"
        "held = {'a': [M()]}" + USE
    )
    captured = CapturedState(names["use"])
    assert captured.changed(names["use"]) == ""
    names["rate"] = 2
    assert captured.changed(names["use"]) == "rate"


def test_what_a_loader_reaches_through_a_table_is_compared_too():
    names = namespace(
        FUNCTION + "import stoker\nheld = {'a': helper}\n@stoker.context\ndef table(): return held['a']()"
    )
    recipe = names["table"]()
    assert changed_since_made(recipe.key) == ""
    names["rate"] = 2
    assert changed_since_made(recipe.key) == "rate"
