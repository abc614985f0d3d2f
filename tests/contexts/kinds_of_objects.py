"""Functions and objects of each kind for test_contexts_payloads.py.

`use_` functions return True in another process; `make_` functions return a local value; Stoker refuses `refuse_`
functions of a script.
"""

# ruff: noqa: B019, E731, RUF012

import contextvars
import dataclasses
import enum
import functools
import json
import logging
import pickle
import subprocess
import sys
import threading
import types
import typing
import weakref

import msgspec

from stoker.contexts import payloads
from stoker.contexts.payloads import dumps_code

THERE = """
import pickle, sys
from stoker.contexts import payloads
from stoker.contexts.payloads import loads_code
sent, ended = pickle.loads(sys.stdin.buffer.read()), {}
for name, data in sent.items():
    try:
        result = loads_code(data)[0]()
        ended[name] = payloads.dumps(result, what="result")
    except BaseException as error:
        ended[name] = repr(error)
sys.stdout.buffer.write(pickle.dumps(ended))
"""


def outcomes(here):
    """Run each function in another process; return `ok` or an error for each function."""
    sent, found = {}, {}
    for name, function in dict(here).items():
        if name.partition("_")[0] in ("use", "make", "refuse"):
            try:
                sent[name] = dumps_code(function, what="function")
            except Exception as error:
                found[name] = str(error)
    given = pickle.dumps(sent)
    done = subprocess.run([sys.executable, "-c", THERE], input=given, capture_output=True, check=True, cwd="/")
    for name, data in pickle.loads(done.stdout).items():
        if isinstance(data, str):
            found[name] = data
            continue
        back = payloads.loads(data, keep_classes=True)
        wanted = here[name]() if name.startswith("make") else True
        same = type(back) is type(wanted) and back == wanted
        found[name] = "ok" if same else f"{back!r} of {type(back)} instead of {wanted!r}"
    return found


# ---- functions with a cache or several implementations


@functools.lru_cache(maxsize=3, typed=True)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def around(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)

    return call


@functools.cache
def cached(x):
    return x


wrapped = around(cached)
cached.attribute = 5


class WithCache:
    @functools.cache
    def method(self):
        return 5

    def __init__(self):
        self.bound = functools.cache(self.method)


@functools.singledispatch
def show(x):
    return "any"


@show.register
def _(x: int):
    return "int"


@show.register(list)
def _(x):
    return [show(y) for y in x]


class Dispatching:
    @functools.singledispatchmethod
    def method(self, x):
        return "any"

    @method.register
    def _(self, x: int):
        return "int"


class WithProperty:
    made = 0

    @functools.cached_property
    def value(self):
        WithProperty.made += 1
        return 3


cached_property = vars(WithProperty)["value"]


def use_cached_property():
    one = WithProperty()
    return one.value + one.value == 6 and WithProperty.made == 1 and cached_property.func is not None


use_cached_function = lambda: fib(20) == 6765 and fib.cache_parameters() == {"maxsize": 3, "typed": True}
use_cached_method = lambda: WithCache().method() == WithCache().bound() == 5
use_attribute_of_a_cached_function = lambda: wrapped.__wrapped__ is cached and cached.attribute == 5
use_generic_function = lambda: show([1, "a"]) == ["int", "any"]
use_generic_method = lambda: Dispatching().method(1) == "int" and Dispatching().method("") == "any"


# ---- closures and modules


def counter():
    n = 0

    class Counter:
        def increase(self):
            nonlocal n
            n += 1

    return Counter(), lambda: n


count, counted = counter()


def use_variable_shared_by_a_class_and_a_function():
    count.increase()
    return counted() == 1


def mutually_recursive():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return even


even = mutually_recursive()


def empty():
    def f():
        return later()

    if 0:
        later = None
    return f


with_empty_cell = empty()


def use_empty_cell():
    try:
        with_empty_cell()
    except NameError:
        return True


class InBody:
    pass


def use_names_in_a_class_body():
    class Local:
        known = InBody
        log = logging.getLogger("there")

    return Local.known is InBody and Local.log.name == "there"


module = types.ModuleType("handmade")
module.x = 3
lock = threading.Lock()
variable = contextvars.ContextVar("variable", default=3)
weak_dict, weak_values, weak_set = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary(), weakref.WeakSet()
referenced = InBody()
reference = weakref.ref(referenced)


def refuse_lock():
    with lock:
        return True


def refuse_context_variable():
    return variable.get() == 3


def refuse_weak_reference():
    return reference() is referenced


use_mutually_recursive_closures = lambda: even(10)
use_handmade_module = lambda: module.x == 3
use_weak_containers = lambda: not weak_dict and not weak_values and not weak_set


# ---- types and objects that are compared with `is`

T = typing.TypeVar("T")
P = typing.ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)
MISSING = object()


def is_missing(x=MISSING):
    return x is MISSING


class Holder:
    missing = MISSING


class Generic(typing.Generic[T]):
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


Alias = Generic[int]

use_sentinel = lambda: is_missing() and Holder.missing is MISSING
use_generic_class = lambda: Alias(UserId(3)).x == Generic[str](3).x == 3
make_sentinel = lambda: MISSING
make_type_variables = lambda: [T, P, Ts, UserId]


# ---- classes


class Colour(enum.Enum):
    RED = 1
    BLUE = "x"
    CALL = functools.partial(lambda a: a + 1)

    def up(self):
        return self.name.upper()


class Flags(enum.Flag):
    X = enum.auto()
    Y = enum.auto()


class Named(typing.NamedTuple):
    a: int
    b: int = 2

    def double(self):
        return self.a * 2


class NamedWithSlots(Named):
    __slots__ = ()


class Own(dict):
    def __missing__(self, key):
        return key


class Slots:
    __slots__ = ("__dict__", "__hidden", "__weakref__", "a")

    def __init__(self, a):
        self.a, self.__hidden, self.free = a, 2, 3

    def __eq__(self, other):
        return (self.a, self.__hidden, self.free) == (other.a, other.__hidden, other.free)

    def get(self):
        return self.a

    __hash__ = None


bound, unbound, member = Slots(3).get, Slots.get, Slots.a


@dataclasses.dataclass(slots=True, weakref_slot=True)
class SlottedData:
    a: int = 1
    b: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class MoreSlottedData(SlottedData):
    c: int = 4


@dataclasses.dataclass(slots=True, frozen=True, order=True, kw_only=True)
class Frozen:
    a: int = 1


class Family:
    children = []

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Family.children.append(cls)


class Child(Family):
    pass


class NamedFamily:
    def __init_subclass__(cls, /, name, **options):
        cls.label = name


class NamedChild(NamedFamily, name="one"):
    pass


def refuse_argument_of_init_subclass():
    return NamedChild.label == "one"


class Struct(msgspec.Struct):
    a: int = 3


def refuse_msgspec():
    return Struct().a == 3


try:
    import pydantic
except ImportError:
    pass
else:

    class Model(pydantic.BaseModel):
        a: int = 3

        @pydantic.field_validator("a")
        @classmethod
        def same(cls, value):
            return value

    make_pydantic = lambda: Model(a="4")

use_enumeration = lambda red=Colour.RED: red is Colour.RED and Colour("x").up() == "BLUE" and Colour.CALL.value(1) == 2
use_named_tuple = lambda: NamedWithSlots(2).double() == 4
use_slots = lambda: bound() == 3 and unbound(Slots(9)) == member.__get__(Slots(9)) == 9
use_dataclass = lambda: MoreSlottedData(c=5).a == 1 and Frozen(a=1) < Frozen(a=2)
use_subclass_hook = lambda: Family.children == [Child]
make_enumeration = lambda: [Colour.RED, Flags.X | Flags.Y]
make_named_tuple = lambda: Named(1)
make_dict_subclass = lambda: Own(b=2)
make_slots = lambda: Slots(1)
make_slotted_dataclass = lambda: SlottedData(5)
make_frozen_dataclass = lambda: Frozen(a=3)


if __name__ == "__main__":
    print(json.dumps(outcomes(globals())))
