"""Functions and objects of each kind for test_contexts_payloads.py. `use_` functions return True in another process;
`make_` functions return a local value; Stoker refuses `refuse_` functions of a script.
"""

# ruff: noqa: B019, E731

import asyncio
import collections
import contextlib
import contextvars
import functools
import itertools
import json
import logging
import operator
import re
import string
import threading
import types
import typing
import weakref

import msgspec
import numpy as np


@functools.lru_cache(maxsize=3, typed=True)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


class WithCache:
    @functools.cache
    def m(self):
        return 5

    def __init__(self):
        self.c = functools.cache(self.m)


@functools.singledispatch
def show(x):
    return "any"


@show.register
def _(x: int):
    return "int"


@show.register(list)
def _(x):
    return [show(y) for y in x]


class SDM:
    @functools.singledispatchmethod
    def m(self, x):
        return "any"

    @m.register
    def _(self, x: int):
        return "int"


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
Ts = typing.TypeVarTuple("Ts")
UserId = typing.NewType("UserId", int)


def use_genericalias2(x: "typing.Annotated[int, 3]" = 0):
    return True


st = staticmethod(lambda: 4)
cv = contextvars.ContextVar("cv", default=3)
log = logging.getLogger("my.log")


def use_logger():
    log.info("x")
    return log.name == "my.log"


adapter = logging.LoggerAdapter(log, {})
wkd = weakref.WeakKeyDictionary()
wvd = weakref.WeakValueDictionary()
ws = weakref.WeakSet()
lam = lambda x: x + 1


def gen(n):
    yield from range(n)


async def co():
    return 3


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


MISSING = object()
pt = functools.partial(lam, 3)


@functools.total_ordering
class TO:
    def __init__(s, x):
        s.x = x

    def __eq__(s, o):
        return s.x == o.x

    def __lt__(s, o):
        return s.x < o.x


ig = operator.itemgetter(1)
rx = re.compile("a")
lock = threading.Lock()


def refuse_lock():
    with lock:
        return True


tl = threading.local()


def refuse_thread_local():
    tl.x = 1
    return tl.x == 1


dd = collections.defaultdict(lambda: 5)
mp = types.MappingProxyType({"a": 1})
cnt_ = itertools.count()


class Outer:
    class Inner:
        v = 1

    def mk(self):
        return Outer.Inner()


class Own(dict):
    def __missing__(self, k):
        return k


own = Own(a=1)


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


tmpl = string.Template("$a")
mod = types.ModuleType("handmade")
mod.x = 3
cp_obj = CP.__dict__["p"]


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

    use_pydantic = lambda: Model(a="4").a == 4

    make_pydantic = lambda: Model(a=4)


class InBody:
    pass


def use_names_in_a_class_body():
    class Local:
        known = InBody
        log = logging.getLogger("there")

    return Local.known is InBody and Local.log.name == "there"


class Struct(msgspec.Struct):
    a: int = 3


use_fib = lambda: fib(20) == 6765 and fib.cache_parameters() == {"maxsize": 3, "typed": True}
use_cached_method = lambda: WithCache().m() == 5 and WithCache().c() == 5
use_singledispatch = lambda: show([1, "a"]) == ["int", "any"]
use_sdm = lambda: SDM().m(1) == "int" and SDM().m("") == "any"


def refuse_frompyfunc():
    return uf(np.arange(3)).tolist() == [1, 2, 3]


use_vectorize = lambda: vec(np.arange(3)).tolist() == [1, 2, 3]
use_typevartuple = lambda: Ts.__name__ == "Ts"
use_newtype = lambda: UserId(3) == 3
use_staticmethod_object = lambda: st() == 4


def refuse_contextvar():
    return cv.get() == 3


use_adapter = lambda: adapter.name == "my.log"
use_weakkeydict = lambda: len(wkd) == 0
use_weakvaluedict = lambda: len(wvd) == 0
use_weakset = lambda: len(ws) == 0
use_generator = lambda: list(gen(3)) == [0, 1, 2]
use_async = lambda: asyncio.run(co()) == 3
use_overload = lambda: ov(3) == 3
use_sentinel = lambda x=MISSING: x is MISSING
use_partial = lambda: pt() == 4
use_total_ordering = lambda: TO(1) <= TO(1) and TO(2) > TO(1)
use_itemgetter = lambda: ig([1, 2]) == 2
use_re = lambda: bool(rx.match("a"))
use_defaultdict = lambda: dd[1] == 5
use_mappingproxy = lambda: mp["a"] == 1
use_count = lambda: next(cnt_) == 0
use_nested = lambda: Outer().mk().v == 1
use_dictsub = lambda: own["z"] == "z" and own["a"] == 1
use_super = lambda: Super().mk().v == 1
use_template = lambda: tmpl.substitute(a=1) == "1"
use_handmade_module = lambda: mod.x == 3
use_cp_object = lambda: cp_obj.func is not None


def refuse_msgspec():
    return Struct().a == 3


make_dict_subclass = lambda: Own(b=2)
make_sentinel = lambda: MISSING
make_new_type = lambda: UserId


if __name__ == "__main__":
    from sent_elsewhere import outcomes

    print(json.dumps(outcomes(globals())))
