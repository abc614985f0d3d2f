# ruff: noqa: B024, E731

import abc
import dataclasses
import enum
import functools
import json
import typing


class B:
    def __init__(s):
        s.f = functools.lru_cache(s._f)

    def _f(s, x):
        return x + 1


b = B()
p = functools.cache(functools.partial(pow, 2))
lo = functools.cache(json.loads)


@functools.cache
def k(x):
    return x


def deco(f):
    @functools.wraps(f)
    def w(*a):
        return f(*a)

    return w


kk = deco(k)
k.attr = 5


class Priv:
    __slots__ = ("__dict__", "__x", "y")

    def __init__(s):
        s.__x = 1
        s.y = 2
        s.z = 3


pv = Priv()


class GS(typing.Generic[typing.TypeVar("Q")]):
    __slots__ = ("a",)

    def __init__(s, a):
        s.a = a


class TN(tuple):
    __slots__ = ()


class NTM(typing.NamedTuple):
    a: int

    def dbl(self):
        return self.a * 2


class NTS(NTM):
    __slots__ = ()


class NTG(typing.NamedTuple, typing.Generic[typing.TypeVar("Z")]):
    a: int


@dataclasses.dataclass(slots=True, weakref_slot=True)
class DW:
    a: int = dataclasses.field(default=3)
    b: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class DInh(DW):
    c: int = 4


def counter():
    n = 0

    class C:
        def inc(self):
            nonlocal n
            n += 1
            return n

    def get():
        return n

    return C(), get


c, get = counter()


def use_counter():
    c.inc()
    return get() == 1


def rec():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    return even


even = rec()


def empty():
    def f():
        return later()

    def g():
        return f

    if 0:
        later = None
    return g


eg = empty()


def use_empty_cell():
    try:
        eg()()
    except NameError:
        return True


class WithReg(abc.ABC):
    pass


WithReg.register(dict)


class Named(enum.Enum):
    A = 1

    @functools.cached_property
    def cp(self):
        return 7

    @classmethod
    def get(cls):
        return cls.A


class EFn(enum.Enum):
    ADD = functools.partial(lambda a: a + 1)


class Dcls:
    @functools.singledispatch
    def s(x):
        return "a"

    @s.register
    @staticmethod
    def _(x: int):
        return "i"


_MISS = object()


def dflt(x=_MISS):
    return x is _MISS


class Holder:
    M = _MISS


use_bound_cache = lambda: b.f(1) == 2 and b.f.__wrapped__.__self__ is b
use_partial_cache = lambda: p(3) == 8
use_installed_cache = lambda: lo("3") == 3
use_wrapped_cache = lambda: kk(3) == 3 and kk.__wrapped__ is k
use_attr = lambda: k.attr == 5 and k.__name__ == "k" and k.cache_info().hits >= 0
use_priv = lambda: pv._Priv__x == 1 and pv.y == 2 and pv.z == 3 and Priv().y == 2
use_gs = lambda: GS[int](3).a == 3
use_tn = lambda: TN((1, 2)) == (1, 2)
use_ntm = lambda: NTM(2).dbl() == 4 and NTS(2).dbl() == 4
use_ntg = lambda: NTG(3).a == 3
use_dw = lambda: DW() == DW(3, [])
use_dinh = lambda: DInh(c=5).c == 5 and DInh().a == 3
use_rec = lambda: even(10)
use_reg = lambda: issubclass(dict, WithReg)
use_named = lambda: Named.A.cp == 7 and Named.get() is Named.A
use_efn = lambda: EFn.ADD.value(1) == 2
use_dcls = lambda: Dcls.s("") == "a"
use_miss = lambda: dflt() and Holder.M is _MISS


if __name__ == "__main__":
    from sent_elsewhere import outcomes

    print(json.dumps(outcomes(globals())))
