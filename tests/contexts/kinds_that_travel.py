"""One of each kind of object that a program may hold, and functions that use them elsewhere or give them back.

`use_` functions answer True elsewhere, `make_` functions give what they give here, `refuse_` functions are refused from
a script. See test_contexts_by_value.py.
"""

# ruff: noqa: B019, E731, RUF012, UP042

import abc
import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import itertools
import json
import logging
import operator
import pickle
import re
import string
import subprocess
import sys
import threading
import types
import typing
import weakref

import msgspec
import numpy as np


@functools.cache
def cached(x):
    return x * 2


@functools.lru_cache(maxsize=3, typed=True)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def use_cache():
    return cached(2) == 4


def use_fib():
    return fib(20) == 6765 and fib.cache_parameters() == {"maxsize": 3, "typed": True}


class WithCache:
    @functools.cache
    def m(self):
        return 5

    @functools.lru_cache
    @staticmethod
    def s():
        return 6

    def __init__(self):
        self.c = functools.cache(self.m)


def use_cached_method():
    return WithCache().m() == 5 and WithCache().c() == 5


@functools.singledispatch
def show(x):
    return "any"


@show.register
def _(x: int):
    return "int"


@show.register(list)
def _(x):
    return [show(y) for y in x]


def use_singledispatch():
    return show([1, "a"]) == ["int", "any"]


class SDM:
    @functools.singledispatchmethod
    def m(self, x):
        return "any"

    @m.register
    def _(self, x: int):
        return "int"


def use_sdm():
    return SDM().m(1) == "int" and SDM().m("") == "any"


class CP:
    n = 0

    @functools.cached_property
    def p(self):
        CP.n += 1
        return 3


def use_cached_property():
    c = CP()
    return c.p + c.p == 6 and CP.n == 1


uf = np.frompyfunc(lambda a: a + 1, 1, 1)
vec = np.vectorize(lambda a: a + 1)


def refuse_frompyfunc():
    return uf(np.arange(3)).tolist() == [1, 2, 3]


def use_vectorize():
    return vec(np.arange(3)).tolist() == [1, 2, 3]


class NT(typing.NamedTuple):
    a: int
    b: int = 2


cnt = collections.namedtuple("cnt", "a b")


class TD(typing.TypedDict, total=False):
    a: int


def use_namedtuple():
    return NT(1) == (1, 2) and NT(1)._replace(a=3).a == 3 and cnt(1, 2).b == 2


def use_typeddict():
    return TD(a=1) == {"a": 1} and "a" in TD.__annotations__


T = typing.TypeVar("T")
P = typing.ParamSpec("P")
Ts = typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)


class G(typing.Generic[T]):
    def __init__(self, x):
        self.x = x


Alias = G[int]
A2 = dict[str, list[int]]
A3 = typing.Callable[[int], str]
A4 = typing.Literal["a"]


def use_typevar():
    return T.__name__ == "T"


def use_paramspec():
    return P.__name__ == "P"


def use_typevartuple():
    return Ts.__name__ == "Ts"


def use_newtype():
    return UserId(3) == 3


def use_alias():
    return Alias(3).x == 3 and A2.__origin__ is dict and A3 is not None and A4 is not None


class GP(typing.Generic[P]):
    pass


def use_genericP():
    return GP() is not None


def use_genericalias2(x: "typing.Annotated[int, 3]" = 0):
    return True


class E(enum.Enum):
    A = 1
    B = "x"

    def up(self):
        return self.name


class Fl(enum.Flag):
    X = enum.auto()
    Y = enum.auto()


class IE(enum.IntEnum):
    A = 1


class SE(str, enum.Enum):
    A = "a"


fe = enum.Enum("fe", "P Q")


def use_enum(e=E.A):
    return e is E.A and E("x") is E.B and E.A.up() == "A" and IE.A == 1 and SE.A == "a" and fe.P.value == 1


def use_flag(f=Fl.X | Fl.Y):
    return f == Fl.X | Fl.Y and Fl.X in f


class Desc:
    def __set_name__(self, o, n):
        self.n = n

    def __get__(self, i, o=None):
        return (self.n, i is None)


class Mix:
    d = Desc()

    @staticmethod
    def s():
        return 1

    @classmethod
    def c(cls):
        return cls.__name__

    @property
    def p(self):
        return 2

    pm = functools.partialmethod(lambda self, x: x, 7)


def use_members():
    return Mix.s() == 1 and Mix.c() == "Mix" and Mix().p == 2 and Mix().pm() == 7 and Mix().d == ("d", False)


st = staticmethod(lambda: 4)
prop = Mix.p


def use_staticmethod_object():
    return st() == 4


bound_c = Mix.c
bound_s = Mix.s


def use_bound():
    return bound_c() == "Mix"


class Slots:
    __slots__ = ("__weakref__", "a")

    def __init__(self, a):
        self.a = a

    def get(self):
        return self.a


bs = Slots(3).get


def use_slots():
    return bs() == 3 and Slots(4).a == 4


member = Slots.a


def use_member_descriptor():
    return member.__get__(Slots(9)) == 9


unbound = Slots.get


def use_unbound():
    return unbound(Slots(9)) == 9


@dataclasses.dataclass(slots=True, frozen=True, order=True, kw_only=True)
class DS:
    a: int = 1
    b: list = dataclasses.field(default_factory=list)

    def sup(self):
        return super().__class__


@dataclasses.dataclass
class DBase:
    a: int
    K: typing.ClassVar[int] = 5
    i: dataclasses.InitVar[int] = 3

    def __post_init__(self, i):
        self.z = i


def use_dataclass():
    return (
        DS(a=2) == DS(a=2)
        and DS(a=1) < DS(a=2)
        and dataclasses.asdict(DS()) == {"a": 1, "b": []}
        and DBase(1).z == 3
        and [f.name for f in dataclasses.fields(DBase)] == ["a"]
    )


class Ab(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
    @property
    @abc.abstractmethod
    def p(self): ...


class Conc(Ab):
    def f(self):
        return super().f() or 1

    p = 3


Ab.register(int)


def use_abc():
    try:
        Ab()
    except TypeError:
        return Conc().f() == 1 and isinstance(3, Ab) and isinstance(Conc(), Ab)


class Prot(typing.Protocol):
    x: int

    def f(self) -> int: ...


@typing.runtime_checkable
class RProt(typing.Protocol):
    def f(self) -> int: ...


def use_protocol():
    return isinstance(Conc(), RProt) and not isinstance(3, RProt)


class PC(Prot):
    def f(self):
        return 1


def use_protocol_sub():
    return PC().f() == 1


class Meta(type):
    reg = []

    def __new__(m, n, b, ns, **k):
        c = super().__new__(m, n, b, ns)
        c.made = True
        m.reg.append(n)
        return c

    def __init__(c, n, b, ns, **k):
        super().__init__(n, b, ns)

    def __call__(c, *a):
        o = super().__call__(*a)
        o.viameta = 1
        return o


class M1(metaclass=Meta):
    pass


class M2(M1, flag=3):
    pass


def use_meta():
    return M2().viameta == 1 and M2.made


class Sub:
    reg = {}

    def __init_subclass__(cls, /, name, **k):
        super().__init_subclass__(**k)
        cls.label = name
        Sub.reg[name] = cls


class S1(Sub, name="one"):
    pass


def refuse_init_subclass():
    return S1.label == "one" and Sub.reg == {"one": S1}


class Sub0:
    reg = []

    def __init_subclass__(cls, **k):
        super().__init_subclass__(**k)
        Sub0.reg.append(cls)


class S01(Sub0):
    pass


def use_init_subclass0():
    return Sub0.reg == [S01]


cv = contextvars.ContextVar("cv", default=3)


def refuse_contextvar():
    return cv.get() == 3


log = logging.getLogger("my.log")


def use_logger():
    log.info("x")
    return log.name == "my.log"


adapter = logging.LoggerAdapter(log, {})


def use_adapter():
    return adapter.name == "my.log"


tgt = Slots(1)
wr = weakref.ref(tgt)


def refuse_weakref():
    return wr() is tgt


wkd = weakref.WeakKeyDictionary()


def use_weakkeydict():
    return len(wkd) == 0


wvd = weakref.WeakValueDictionary()


def use_weakvaluedict():
    return len(wvd) == 0


ws = weakref.WeakSet()


def use_weakset():
    return len(ws) == 0


lam = lambda x: x + 1


def use_lambda():
    return lam(1) == 2


def gen(n):
    yield from range(n)


def use_generator():
    return list(gen(3)) == [0, 1, 2]


async def co():
    return 3


def use_async():
    return asyncio.run(co()) == 3


@contextlib.contextmanager
def cm():
    yield 3


def use_contextmanager():
    with cm() as x:
        return x == 3


@typing.overload
def ov(x: int) -> int: ...
@typing.overload
def ov(x: str) -> str: ...
def ov(x):
    return x


def use_overload():
    return ov(3) == 3


MISSING = object()


def use_sentinel(x=MISSING):
    return x is MISSING


pt = functools.partial(lam, 3)


def use_partial():
    return pt() == 4


@functools.total_ordering
class TO:
    def __init__(s, x):
        s.x = x

    def __eq__(s, o):
        return s.x == o.x

    def __lt__(s, o):
        return s.x < o.x


def use_total_ordering():
    return TO(1) <= TO(1) and TO(2) > TO(1)


ig = operator.itemgetter(1)


def use_itemgetter():
    return ig([1, 2]) == 2


rx = re.compile("a")


def use_re():
    return bool(rx.match("a"))


lock = threading.Lock()


def refuse_lock():
    with lock:
        return True


tl = threading.local()


def refuse_thread_local():
    tl.x = 1
    return tl.x == 1


ns = types.SimpleNamespace(a=1)

dd = collections.defaultdict(lambda: 5)


def use_defaultdict():
    return dd[1] == 5


mp = types.MappingProxyType({"a": 1})


def use_mappingproxy():
    return mp["a"] == 1


cnt_ = itertools.count()


def use_count():
    return next(cnt_) == 0


class Exc(Exception):
    def __init__(self, *, code):
        super().__init__("x")
        self.code = code


def use_exception():
    try:
        raise Exc(code=3)
    except Exc as e:
        return e.code == 3


class Outer:
    class Inner:
        v = 1

    def mk(self):
        return Outer.Inner()


def use_nested():
    return Outer().mk().v == 1


class Own(dict):
    def __missing__(self, k):
        return k


own = Own(a=1)


def use_dictsub():
    return own["z"] == "z" and own["a"] == 1


class Single:
    _i = None

    def __new__(cls):
        if cls._i is None:
            cls._i = super().__new__(cls)
        return cls._i


single = Single()


def use_singleton():
    return Single() is single


class New:
    def __new__(cls, a):
        o = super().__new__(cls)
        o.a = a
        return o


nw = New(3)


class Ga:
    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return n


ga = Ga()


def use_getattr():
    return ga.abc == "abc"


def outer():
    n = 0

    def inc():
        nonlocal n
        n += 1
        return n

    def get():
        return n

    return inc, get


inc, get = outer()


def use_closure():
    inc()
    return get() == 1


class Super(Outer):
    def mk(self):
        return super().mk()


def use_super():
    return Super().mk().v == 1


class ClsGetitem:
    def __class_getitem__(cls, k):
        return k


def use_class_getitem():
    return ClsGetitem[3] == 3


class IterM(type):
    def __iter__(cls):
        return iter([1, 2])


class ItC(metaclass=IterM):
    pass


def use_iterable_class():
    return list(ItC) == [1, 2]


tmpl = string.Template("$a")


def use_template():
    return tmpl.substitute(a=1) == "1"


slog = logging.getLogger()

mod = types.ModuleType("handmade")
mod.x = 3


def use_handmade_module():
    return mod.x == 3


getsetd = type.__dict__["__mro__"]

cp_obj = CP.__dict__["p"]


def use_cp_object():
    return cp_obj.func is not None


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

    def use_pydantic():
        return Model(a="4").a == 4

    def make_pydantic():
        return Model(a=4)


@dataclasses.dataclass(slots=True)
class SlottedData:
    a: int = 1


class EmptySlots:
    __slots__ = ()


class MoreSlots(EmptySlots):
    __slots__ = ("__hidden", "a")

    def __init__(self):
        self.a = 1
        self.__hidden = 2

    def __eq__(self, other):
        return (self.a, self.__hidden) == (other.a, other.__hidden)

    __hash__ = None


class Parent:
    pass


class InBody:
    pass


def use_names_in_a_class_body():
    class Local:
        known = InBody
        log = logging.getLogger("there")

    return Local.known is InBody and Local.log.name == "there"


class Struct(msgspec.Struct):
    a: int = 3


def refuse_msgspec():
    return Struct().a == 3


def make_slotted_dataclass():
    return SlottedData(5)


def make_slots():
    return MoreSlots()


def make_frozen_dataclass():
    return DS(a=3)


def make_enum():
    return E.A


def make_flag():
    return Fl.X | Fl.Y


def make_namedtuple():
    return NT(1)


def make_typed_dictionary():
    return TD(a=1)


def make_dict_subclass():
    return Own(b=2)


def make_sentinel():
    return MISSING


def make_new_type():
    return UserId


def make_type_variable():
    return T


def make_parameters():
    return P


THERE = """
import pickle, sys
from stoker.contexts import payloads
from stoker.contexts.code_payloads import loads_code
sent, ended = pickle.loads(sys.stdin.buffer.read()), {}
for name, data in sent.items():
    try:
        result = loads_code(data)[0]()
        ended[name] = payloads.dumps(result, what="result")
    except BaseException as error:
        ended[name] = repr(error)
sys.stdout.buffer.write(pickle.dumps(ended))
"""


def outcomes():
    """How each function of this module ended elsewhere: `ok`, or what went wrong."""
    from stoker.contexts import payloads
    from stoker.contexts.code_payloads import dumps_code

    sent, found, here = {}, {}, dict(globals())
    for name, function in here.items():
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


if __name__ == "__main__":
    print(json.dumps(outcomes()))
