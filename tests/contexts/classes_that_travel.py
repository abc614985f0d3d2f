# ruff: noqa: E731, RUF012, UP042

import abc
import collections
import dataclasses
import enum
import functools
import json
import typing
import weakref


class NT(typing.NamedTuple):
    a: int
    b: int = 2


cnt = collections.namedtuple("cnt", "a b")


class TD(typing.TypedDict, total=False):
    a: int


T = typing.TypeVar("T")
P = typing.ParamSpec("P")


class G(typing.Generic[T]):
    def __init__(self, x):
        self.x = x


Alias = G[int]
A2 = dict[str, list[int]]
A3 = typing.Callable[[int], str]
A4 = typing.Literal["a"]


class GP(typing.Generic[P]):
    pass


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


bound_c = Mix.c


class Slots:
    __slots__ = ("__weakref__", "a")

    def __init__(self, a):
        self.a = a

    def get(self):
        return self.a


bs = Slots(3).get
member = Slots.a
unbound = Slots.get


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


class PC(Prot):
    def f(self):
        return 1


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


class Sub:
    reg = {}

    def __init_subclass__(cls, /, name, **k):
        super().__init_subclass__(**k)
        cls.label = name
        Sub.reg[name] = cls


class S1(Sub, name="one"):
    pass


class Sub0:
    reg = []

    def __init_subclass__(cls, **k):
        super().__init_subclass__(**k)
        Sub0.reg.append(cls)


class S01(Sub0):
    pass


tgt = Slots(1)
wr = weakref.ref(tgt)


class Exc(Exception):
    def __init__(self, *, code):
        super().__init__("x")
        self.code = code


def use_exception():
    try:
        raise Exc(code=3)
    except Exc as e:
        return e.code == 3


class Single:
    _i = None

    def __new__(cls):
        if cls._i is None:
            cls._i = super().__new__(cls)
        return cls._i


single = Single()


class Ga:
    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return n


ga = Ga()


class ClsGetitem:
    def __class_getitem__(cls, k):
        return k


class IterM(type):
    def __iter__(cls):
        return iter([1, 2])


class ItC(metaclass=IterM):
    pass


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


use_namedtuple = lambda: NT(1) == (1, 2) and NT(1)._replace(a=3).a == 3 and cnt(1, 2).b == 2
use_typeddict = lambda: TD(a=1) == {"a": 1} and "a" in TD.__annotations__
use_typevar = lambda: T.__name__ == "T"
use_paramspec = lambda: P.__name__ == "P"
use_alias = lambda: Alias(3).x == 3 and A2.__origin__ is dict and A3 is not None and A4 is not None
use_genericP = lambda: GP() is not None
use_flag = lambda f=Fl.X | Fl.Y: f == Fl.X | Fl.Y and Fl.X in f
use_bound = lambda: bound_c() == "Mix"
use_slots = lambda: bs() == 3 and Slots(4).a == 4
use_member_descriptor = lambda: member.__get__(Slots(9)) == 9
use_unbound = lambda: unbound(Slots(9)) == 9
use_protocol = lambda: isinstance(Conc(), RProt) and not isinstance(3, RProt)
use_protocol_sub = lambda: PC().f() == 1
use_meta = lambda: M2().viameta == 1 and M2.made


def refuse_init_subclass():
    return S1.label == "one" and Sub.reg == {"one": S1}


use_init_subclass0 = lambda: Sub0.reg == [S01]


def refuse_weakref():
    return wr() is tgt


use_singleton = lambda: Single() is single
use_getattr = lambda: ga.abc == "abc"
use_class_getitem = lambda: ClsGetitem[3] == 3
use_iterable_class = lambda: list(ItC) == [1, 2]
make_slotted_dataclass = lambda: SlottedData(5)
make_slots = lambda: MoreSlots()
make_frozen_dataclass = lambda: DS(a=3)
make_enum = lambda: E.A
make_flag = lambda: Fl.X | Fl.Y
make_namedtuple = lambda: NT(1)
make_typed_dictionary = lambda: TD(a=1)
make_type_variable = lambda: T
make_parameters = lambda: P


if __name__ == "__main__":
    from sent_elsewhere import outcomes

    print(json.dumps(outcomes(globals())))
