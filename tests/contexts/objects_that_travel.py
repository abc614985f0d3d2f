"""One of each kind of function and object that a program may hold, for test_contexts_payloads.py.

`use_` functions answer True elsewhere, `make_` functions give what they give here, `refuse_` functions are refused from
a script.
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


Ts = typing.TypeVarTuple("Ts")


UserId = typing.NewType("UserId", int)


def use_typevartuple():
    return Ts.__name__ == "Ts"


def use_newtype():
    return UserId(3) == 3


def use_genericalias2(x: "typing.Annotated[int, 3]" = 0):
    return True


st = staticmethod(lambda: 4)


def use_staticmethod_object():
    return st() == 4


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


dd = collections.defaultdict(lambda: 5)


def use_defaultdict():
    return dd[1] == 5


mp = types.MappingProxyType({"a": 1})


def use_mappingproxy():
    return mp["a"] == 1


cnt_ = itertools.count()


def use_count():
    return next(cnt_) == 0


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


tmpl = string.Template("$a")


def use_template():
    return tmpl.substitute(a=1) == "1"


mod = types.ModuleType("handmade")


mod.x = 3


def use_handmade_module():
    return mod.x == 3


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


def make_dict_subclass():
    return Own(b=2)


def make_sentinel():
    return MISSING


def make_new_type():
    return UserId


if __name__ == "__main__":
    from sent_elsewhere import outcomes

    print(json.dumps(outcomes(globals())))
