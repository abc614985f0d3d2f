"""Fingerprints of values: they see what changes in place, end on any value, and run no code of the user's."""

from __future__ import annotations

import array
import dataclasses
import datetime
import enum
import functools
import gc
import logging
import subprocess
import sys
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple

import numpy as np
import pytest

from stoker.contexts import array_facts, user_code
from stoker.contexts.array_facts import WHOLE_BYTES, Meter
from stoker.contexts.fingerprint import MOST_VALUES, Fingerprint
from stoker.contexts.own_attributes import is_users_class, layout_of


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    layers: list = dataclasses.field(default_factory=lambda: [1, 2])


class Slots:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


class Wordy(dict):
    pass


class Base:
    level = 1


class Config(Base):
    rate = 1
    table = {"a": [1]}  # noqa: RUF012

    def act(self):
        return self.rate


Pair = namedtuple("Pair", "one two")


def nested():
    return {"a": [{"b": (1, [2, {3}])}]}


def plain():
    return None


TABLE = {"a": 1}
ORDERED = OrderedDict(a=1)


class Seconds(int):
    pass


class Ratio(float):
    __slots__ = ("note",)


class Phase(complex):
    __slots__ = ()


class Tag(str):
    __slots__ = ("note",)


class Key(bytes):
    pass


class Day(datetime.date):
    """It has hidden state, a slot, and no weak references."""

    __slots__ = ("note",)


def swap(value):
    value[[1, 3]] = value[[3, 1]]


def swap_bytes(value):
    value[7_001], value[7_002] = value[7_002], value[7_001]


def swap_two(value):
    value[7_001], value[9_001] = value[9_001], value[7_001]


def move(value):
    value[7_001] -= 1
    value[9_001] += 1


KINDS = [
    ("a list", lambda: [1, 2], lambda v: v.append(3)),
    ("an element", lambda: [1, 2], lambda v: v.__setitem__(1, 5)),
    ("a number of another kind", lambda: [1, 2], lambda v: v.__setitem__(0, True)),
    ("a sign", lambda: [0.0], lambda v: v.__setitem__(0, -0.0)),
    ("a dict", lambda: {"a": 1}, lambda v: v.update(a=2)),
    ("a dict's key", lambda: {"a": 1}, lambda v: v.update(b=v.pop("a"))),
    ("a set", lambda: {1, 2}, lambda v: v.add(3)),
    ("a dict, in a tuple", lambda: ({"a": 1},), lambda v: v[0].clear()),
    ("nested containers", nested, lambda v: v["a"][0]["b"][1][1].add(4)),
    ("a deque", lambda: deque([1, [2]]), lambda v: v[1].append(3)),
    ("a deque's order", lambda: deque([1, 2]), lambda v: v.rotate()),
    ("an OrderedDict", lambda: OrderedDict(a=1, b=2), lambda v: v.update(a=3)),
    ("an OrderedDict's order", lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    ("a defaultdict", lambda: defaultdict(list), lambda v: v["a"].append(1)),
    ("a Counter", lambda: Counter("aab"), lambda v: v.update("a")),
    ("a UserDict", lambda: UserDict(a=1), lambda v: v.update(a=2)),
    ("a dict's subclass", lambda: Wordy(a=1), lambda v: v.update(a=2)),
    ("an attribute of a dict's subclass", lambda: Wordy(a=1), lambda v: setattr(v, "more", 2)),
    ("a named tuple's list", lambda: Pair([1], 2), lambda v: v.one.append(1)),
    ("a bytearray", lambda: bytearray(b"ab"), lambda v: v.__setitem__(0, 1)),
    ("a large bytearray", lambda: bytearray(100_000), lambda v: v.__setitem__(77_777, 1)),
    ("a large array.array", lambda: array.array("d", range(20_000)), swap_two),
    ("an array.array of 8 MB", lambda: array.array("d", range(1_000_000)), lambda v: v.reverse()),
    ("an array.array", lambda: array.array("d", [1, 2]), lambda v: v.__setitem__(0, 3)),
    ("a dataclass", Settings, lambda v: setattr(v, "rate", 0.2)),
    ("a dataclass's list", Settings, lambda v: v.layers.append(3)),
    ("a new attribute", Settings, lambda v: setattr(v, "more", None)),
    ("a removed attribute", Settings, lambda v: delattr(v, "rate")),
    ("a SimpleNamespace", lambda: types.SimpleNamespace(a=[1]), lambda v: v.a.append(2)),
    ("slots", Slots, lambda v: setattr(v, "a", 2)),
    ("an empty slot", Slots, lambda v: setattr(v, "b", None)),
    ("an exception", lambda: ValueError("a"), lambda v: v.add_note("b")),
    ("a partial", lambda: functools.partial(print, [1]), lambda v: v.args[0].append(2)),
    ("a bound method's object", lambda: Config().act, lambda v: setattr(v.__self__, "rate", 3)),
    ("a small array", lambda: np.zeros(3), lambda v: v.__setitem__(1, 2.0)),
    ("an array without axes", lambda: np.array(1.0), lambda v: v.fill(2)),
    ("an array of 1 MB", lambda: np.zeros(131_072), lambda v: v.__setitem__(77_777, 1e-300)),
    ("an array of 1 MB and a byte", lambda: np.zeros(2**20 + 1, np.int8), lambda v: v.__setitem__(2**20, 1)),
    ("the order of a large array", lambda: np.arange(131_072), lambda v: np.random.default_rng(1).shuffle(v)),
    ("a large array with gaps", lambda: np.zeros((512, 512))[:, ::2], lambda v: v.__setitem__((77, 77), 1)),
    ("two elements that change places", lambda: np.arange(20_000), swap),
    ("an amount moved to another element", lambda: np.full(500_000, 10), move),
    ("two numbers in a large buffer", lambda: bytearray(b"abc" * 1_000_000), swap_bytes),
    (
        "all of a bytearray of 40 MB",
        lambda: bytearray(40_000_000),
        lambda v: v.__setitem__(slice(None), b"a" * 40_000_000),
    ),
    ("all of an array of 40 MB", lambda: np.zeros((5, 1_000_000)), lambda v: v.__iadd__(1)),
    ("an array of texts", lambda: np.array(["a", "bb"]), lambda v: v.__setitem__(0, "c")),
    ("an array of objects", lambda: np.array([[1], None], dtype=object), lambda v: v[0].append(2)),
    ("a record", lambda: np.zeros(2, [("a", "i4"), ("b", "f8")]), lambda v: v["b"].__setitem__(1, 2)),
    ("a view of a dict", lambda: types.MappingProxyType(TABLE), lambda v: TABLE.update(a=TABLE["a"] + 1)),
    ("the keys of a dict", lambda: TABLE.keys(), lambda v: TABLE.update({f"key {len(TABLE)}": 1})),
    ("the values of a dict", lambda: TABLE.values(), lambda v: TABLE.update(a=TABLE["a"] + 1)),
    ("the items of an OrderedDict", lambda: ORDERED.items(), lambda v: ORDERED.update(a=ORDERED["a"] + 1)),
    ("a dict's method", lambda: {"a": 1}.get, lambda v: v.__self__.update(a=2)),
    ("a list's method", lambda: [1].index, lambda v: v.__self__.append(2)),
    ("a set's operator", lambda: {1}.__contains__, lambda v: v.__self__.add(2)),
    ("an array's method", lambda: np.zeros(3).dot, lambda v: v.__self__.fill(1)),
    ("an exception's arguments", lambda: ValueError("a"), lambda v: setattr(v, "args", ("b",))),
    ("a list in an exception", lambda: ValueError([1]), lambda v: v.args[0].append(2)),
    ("an attribute of a number", lambda: Seconds(1), lambda v: setattr(v, "note", 2)),
    ("a masked array", lambda: np.ma.array([1, 2], mask=[0, 0]), lambda v: v.__setitem__(0, np.ma.masked)),
    ("a shape", lambda: np.zeros(4), lambda v: setattr(v, "shape", (2, 2))),
    ("an array in an attribute", lambda: types.SimpleNamespace(a=[np.zeros(2)]), lambda v: v.a[0].fill(1)),
]


@pytest.mark.filterwarnings("ignore:Setting the shape")
@pytest.mark.parametrize(("make", "change"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_a_change_in_place_is_seen(make, change):
    value = make()
    before = Fingerprint(value)
    assert before.matches(value)
    change(value)
    assert not before.matches(value)
    assert Fingerprint(value).matches(value)


@pytest.mark.parametrize("value", [kind[1] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_an_unchanged_value_stays_the_same_while_others_change(value):
    kept = value()
    before = Fingerprint(kept)
    other = value()
    gc.collect()
    assert before.matches(kept)
    del other
    assert before.matches(kept)


def test_members_of_users_classes_are_seen(monkeypatch):
    assert is_users_class(Config)
    for owner, name, now in [
        (Config, "rate", 2),
        (Base, "level", 2),
        (Config, "act", lambda self: 7),
        (Config, "__call__", lambda self: 7),
    ]:
        of_class, of_instance = Fingerprint(Config), Fingerprint(Config())
        instance = Config()
        of_instance = Fingerprint(instance)
        monkeypatch.setattr(owner, name, now, raising=False)
        assert not of_class.matches(Config), name
        assert not of_instance.matches(instance), name
    before = Fingerprint(Config)
    monkeypatch.setitem(Config.table, "a", [2])
    assert not before.matches(Config)


def test_a_replaced_code_of_a_function_in_a_value_is_seen():
    names: dict[str, object] = {"__name__": "__main__"}
    exec("def one(): return 1\ndef two(): return 2\n", names)
    held = [names["one"]]
    before = Fingerprint(held)
    names["one"].__code__ = names["two"].__code__
    assert not before.matches(held)


@pytest.mark.parametrize(
    "one",
    [plain, len, int, Fingerprint, logging.getLogger("a"), datetime.datetime(2026, 1, 2), range(3), sys, object()],
    ids=["function", "builtin", "builtin-class", "installed-class", "logger", "time", "range", "module", "object"],
)
def test_what_is_not_understood_counts_by_identity(one):
    held = [one]
    before = Fingerprint(held)
    assert before.matches(held)
    held[0] = object()
    assert not before.matches(held)


REBOUND = {
    "an exception": (ValueError("a"), ValueError("b")),
    "an int": (Seconds(1), Seconds(2)),
    "a large int": (Seconds(10**5_000), Seconds(10**5_000 + 1)),
    "a float": (Ratio(0.0), Ratio(-0.0)),
    "a complex": (Phase(1), Phase(2)),
    "a text": (Tag("a"), Tag("b")),
    "a large text": (Tag("a" * 100_000), Tag("a" * 99_999 + "\ud800")),
    "bytes": (Key(b"a"), Key(b"b")),
    "large bytes": (Key(b"a" * 100_000), Key(b"a" * 99_999 + b"b")),
    "hidden state beside a slot": (Day(2026, 1, 2), Day(2026, 1, 3)),
    "a method": ({"a": 1}.get, {"a": 1}.pop),
}


@pytest.mark.parametrize(("one", "other"), REBOUND.values(), ids=REBOUND)
def test_another_object_whose_content_lies_in_c_is_seen(one, other):
    holders = [[one], {"a": one}, types.SimpleNamespace(a=one)]
    before, within = Fingerprint(one), [Fingerprint(holder) for holder in holders]
    assert before.matches(one)
    assert all(look.matches(holder) for look, holder in zip(within, holders, strict=True))
    assert not before.matches(other)
    holders[0][0] = holders[1]["a"] = holders[2].a = other
    assert not any(look.matches(holder) for look, holder in zip(within, holders, strict=True))


@pytest.mark.parametrize("make", [lambda: Seconds(3), lambda: Tag("a"), lambda: Key(b"a"), lambda: Ratio("nan")])
def test_an_equal_number_or_text_of_the_users_has_not_changed(make):
    held = [make()]
    before = Fingerprint(held)
    held[0] = make()
    assert before.matches(held)


def test_an_exception_and_the_frames_that_it_holds_are_not_kept_alive():
    def fail():
        local = Settings()
        gone.append(weakref.ref(local))
        raise ValueError("a")

    gone: list[weakref.ref] = []
    try:
        fail()
    except ValueError as error:
        held = [error]
    before = Fingerprint(held)
    assert before.matches(held)
    held[0] = None
    gc.collect()
    assert gone[0]() is None
    assert not before.matches(held)


@pytest.mark.parametrize("name", ["numpy", "torch", "torch.nn", "polars", "pandas.core.generic"])
def test_a_library_that_another_thread_is_importing_may_lack_its_classes(monkeypatch, name):
    held = [type("New", (), {"__module__": name.partition(".")[0]})()]
    held[0].state = [1]
    monkeypatch.setattr(user_code, "_known", {})  # what is found out of the bare module stays here
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    before = Fingerprint(held)
    assert before.matches(held)
    held[0].state.append(2)
    assert not before.matches(held)


def test_a_logger_that_comes_to_have_handlers_has_not_changed():
    logger = logging.getLogger("stoker.tests.fingerprint")
    before = Fingerprint([logger])
    logger.addHandler(logging.NullHandler())
    assert before.matches([logger])


def test_an_object_whose_id_is_used_again_is_another_one():
    class One:
        __slots__ = ("__weakref__",)

    held = [One()]
    before, place = Fingerprint(held), id(held[0])
    for _ in range(100):
        held[0] = None
        held[0] = One()
        if id(held[0]) == place:
            break
    assert id(held[0]) == place
    assert not before.matches(held)


def test_cycles_end():
    value: list = [1]
    value.append(value)
    settings = Settings()
    settings.me = {"me": settings, "list": value}
    before = Fingerprint(settings)
    assert before.matches(settings)
    value[0] = 2
    assert not before.matches(settings)


def test_a_deep_value_ends():
    deepest: list = []
    value = deepest
    for _ in range(20_000):
        value = [value]
    assert Fingerprint(value).matches(value)


def test_the_walk_is_bounded_and_neighbours_of_a_large_container_are_met():
    large, beside = list(range(1_000_000)), [1]
    value = [large, beside]
    before = Fingerprint(value)
    large[-1] = 0  # beyond the bound
    assert before.matches(value)
    beside[0] = 2
    assert not before.matches(value)
    before = Fingerprint(value)
    large[MOST_VALUES // 8] = -1
    assert not before.matches(value)
    before = Fingerprint(value)
    large.append(1)
    assert not before.matches(value)


def test_the_bytes_that_are_read_are_bounded_over_all_arrays_and_buffers():
    meter = Meter()
    shares = [meter.share_bytes(65_536) for _ in range(2_000)]
    assert sum(shares[:64]) == WHOLE_BYTES == 64 * 65_536
    assert sum(shares[64:]) < 2_000_000
    assert min(shares) == 512
    assert Meter().share_bytes(10**12) < 65_536


def test_beyond_the_bound_a_sample_is_compared():
    first, second = np.zeros((3, 1_000_000), np.int8), bytearray(3_000_000)
    value = [first, second]
    before = Fingerprint(value)
    second[1] = 1  # between two places of the sample
    assert before.matches(value)
    second[:] = b"a" * len(second)
    assert not before.matches(value)
    before = Fingerprint(value)
    first[2, 77_777] = 1
    assert not before.matches(value)


@pytest.mark.parametrize("cut", [np.s_[:], np.s_[:, ::2], np.s_[:, :, ::3]], ids=["whole", "gaps", "far gaps"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_sample_of_an_array_is_small_whatever_its_axes(cut, order):
    plain = np.zeros((120, 130, 140), order=order)[cut]
    sample = array_facts._sample(plain, 4_096)
    assert 512 <= sample.size <= 4_096


def test_another_container_that_is_cut_alike_is_another_one():
    value = [list(range(5_000))]
    before = Fingerprint(value)
    value[0] = list(range(5_000))
    value[0][-1] = 0
    assert not before.matches(value)


def test_nothing_is_kept_alive():
    settings = Settings()
    settings.me = [settings, {"settings": settings}, np.zeros(3)]
    gone, before = weakref.ref(settings), Fingerprint(settings)
    del settings
    gc.collect()
    assert gone() is None
    assert not before.matches(Settings())


# ---- hostile classes


def never(*_args):
    """Stands for every method of a hostile class. No `except Exception` stops it."""
    raise SystemExit("code of the user's ran")


_ASKED = "__hash__ __eq__ __getattribute__ __getattr__ __len__ __iter__ __bool__ __repr__ __getitem__ keys items"
_ASKED += " __reduce_ex__ __getstate__ __dir__ __contains__ __sizeof__"


def make_hostile(*bases, **members):
    """An instance of a class, with a metaclass, none of whose methods may run."""
    meta = type("Meta", (type,), dict.fromkeys(["__hash__", "__eq__", "__getattribute__", "__subclasscheck__"], never))
    kind = type.__new__(
        meta, "Hostile", bases, {**dict.fromkeys(_ASKED.split(), never), "shown": property(never), **members}
    )
    return bases[0].__new__(kind) if bases else object.__new__(kind)


def test_no_code_of_the_user_runs():
    bases: list = [(), (dict,), (list,), (OrderedDict,), (deque,), (tuple,), (set,), (int,), (Settings,)]
    bases += [(float,), (complex,), (str,), (bytes,), (ValueError,)]
    for base in bases:
        one = make_hostile(*base)
        for value in (one, [one], {"a": one}, type(one)):
            assert Fingerprint(value).matches(value)
        other = make_hostile(*base)
        held = [one]
        before = Fingerprint(held)
        held[0] = other
        assert not before.matches(held)
    hidden = make_hostile(__dict__=property(never), __class__=property(never))
    assert Fingerprint([hidden]).matches([hidden])


def test_no_code_of_a_users_array_runs(monkeypatch):
    class Odd(np.ndarray):
        pass

    odd = np.zeros(100_000).view(Odd)
    for name in ("__array_finalize__", "__getitem__", "__eq__", "__array_wrap__", "__array_ufunc__", "view", "tobytes"):
        monkeypatch.setattr(Odd, name, never)
    before = Fingerprint([odd])
    assert before.matches([odd])
    np.ndarray.fill(odd, 1)
    assert not before.matches([odd])


@pytest.mark.parametrize("length", [10, 100_000, 10_000_000])
def test_no_code_of_a_users_buffer_runs(length):
    for kind, make in ((bytearray, length), (array.array, ("b", bytes(length)))):
        methods = dict.fromkeys(("__getitem__", "__len__", "__iter__", "__buffer__", "__bytes__", "__index__"), never)
        odd = type("Odd", (kind,), methods)(*make if isinstance(make, tuple) else (make,))
        before = Fingerprint([odd])
        assert before.matches([odd])
        kind.__setitem__(odd, 0, 1)
        assert not before.matches([odd])


def test_the_state_of_hostile_objects_is_seen():
    one = make_hostile()
    object.__setattr__(one, "state", [1])
    state = layout_of(type(one)).dictionary(one)["state"]
    before = Fingerprint([one])
    state.append(2)
    assert not before.matches([one])
    for base, change in [(dict, lambda v: dict.update(v, a=1)), (list, lambda v: list.append(v, 1))]:
        table = make_hostile(base)
        before = Fingerprint(table)
        change(table)
        assert not before.matches(table)


def test_a_value_that_cannot_be_read_counts_by_identity_and_its_neighbours_are_read():
    torch = pytest.importorskip("torch")
    broken = torch.nn.UninitializedParameter()  # it has no shape yet
    with pytest.raises(RuntimeError):
        broken.shape  # noqa: B018
    value = [broken, [1]]
    before = Fingerprint(value)
    assert before.matches(value)
    value[1].append(2)
    assert not before.matches(value)


def test_enums_count_by_identity():
    class Color(enum.Flag):
        RED = 1
        BLUE = 2

    value = [Color.RED, Color]
    before = Fingerprint(value)
    assert Color.RED | Color.BLUE  # it is made and kept in the class
    assert before.matches(value)
    value[0] = Color.BLUE
    assert not before.matches(value)


def test_no_library_is_imported_for_it():
    program = (
        "import sys\nfrom stoker.contexts.fingerprint import Fingerprint\n"
        "value = [1, {'a': object()}]\nassert Fingerprint(value).matches(value)\n"
        "print([name for name in ('numpy', 'torch', 'pandas') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
