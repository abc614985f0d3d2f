"""Modules that travelled with one function are out of the way of the others, and come back as they were."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stoker.contexts import carried_modules
from stoker.contexts.carried_modules import NO_MODULES, CarriedModules, leave
from stoker.contexts.set_aside import ModulesSetAside


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """What a test imports is gone after it."""
    before, finders = set(sys.modules), list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    carried_modules.before_replacing = None
    carried_modules._finder.base = NO_MODULES
    NO_MODULES.enter()
    carried_modules._here.clear()
    carried_modules._set_aside.clear()
    for name in set(sys.modules) - before:
        if name.startswith("sa_"):
            del sys.modules[name]


def brought(version: str = "1", **sources: str) -> CarriedModules:
    """Modules that travelled, by name; `__` stands for a dot, and a package is one that another lies in."""
    named = {name.replace("__", "."): text for name, text in sources.items()}
    table = {
        name: (f"/nowhere/{name}.py", any(other.startswith(f"{name}.") for other in named), version, text.encode())
        for name, text in named.items()
    }
    return CarriedModules(table, {})


def imported(name: str) -> Any:
    return importlib.import_module(name)


def test_a_call_that_brings_nothing_finds_nothing_that_another_brought() -> None:
    bobs = brought(sa_model="class Model:\n    whose = 'bob'\n")
    bobs.enter()
    data = pickle.dumps(imported("sa_model").Model())
    NO_MODULES.enter()
    with pytest.raises(ModuleNotFoundError):
        imported("sa_model")
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(data)
    bobs.enter()
    assert pickle.loads(data).whose == "bob"


def test_what_was_set_aside_comes_back_as_it_was() -> None:
    ours = brought(sa_pack="", sa_pack__part="COUNT = 0\n", sa_plain="class Kind:\n    pass\n")
    ours.enter()
    part, kind, pack = imported("sa_pack.part"), imported("sa_plain").Kind, sys.modules["sa_pack"]
    part.COUNT += 1
    beside: Any = types.ModuleType("sa_pack.beside")  # found on the search path, or made by the package
    sys.modules["sa_pack.beside"] = pack.beside = beside
    for other in (NO_MODULES, brought("2", sa_pack="", sa_pack__part="COUNT = 10\n"), NO_MODULES):
        other.enter()
        assert not {"sa_pack.beside", "sa_plain"} & set(sys.modules)
        if other.found:
            assert imported("sa_pack.part").COUNT == 10
            assert not hasattr(imported("sa_pack"), "beside")
    ours.enter()
    assert imported("sa_pack.part") is part
    assert (part.COUNT, imported("sa_pack"), pack.part, imported("sa_pack.beside")) == (1, pack, part, beside)
    assert imported("sa_plain").Kind is kind


def test_a_part_that_a_call_does_not_want_is_off_its_package() -> None:
    both, one = brought(sa_pack="", sa_pack__part="COUNT = 1\n"), brought(sa_pack="", sa_pack__other="")
    both.enter()
    part = imported("sa_pack.part")
    one.enter()
    assert not hasattr(imported("sa_pack"), "part")
    both.enter()
    assert imported("sa_pack").part is part


def test_a_module_that_puts_something_else_into_its_place_is_set_aside_too() -> None:
    ours, theirs = (
        brought(word, sa_lazy=f"import sys\nclass Lazy:\n    word = {word!r}\nsys.modules[__name__] = Lazy()\n")
        for word in ("ours", "theirs")
    )
    ours.enter()
    first = imported("sa_lazy")
    NO_MODULES.enter()
    assert "sa_lazy" not in sys.modules
    theirs.enter()
    assert imported("sa_lazy").word == "theirs"
    ours.enter()
    assert imported("sa_lazy") is first


def test_what_user_code_took_out_of_the_process_is_imported_anew() -> None:
    ours = brought(sa_pack="", sa_pack__part="")
    ours.enter()
    part = imported("sa_pack.part")
    del sys.modules["sa_pack.part"]
    NO_MODULES.enter()
    ours.enter()
    assert imported("sa_pack.part") is not part


def test_a_library_without_context_hears_of_another_version_and_not_of_turns() -> None:
    heard: list[str] = []
    first, second = brought("1", sa_plain="WIDTH = 1\n"), brought("2", sa_plain="WIDTH = 2\n")
    carried_modules.before_replacing = lambda: heard.append(str(sys.modules.get("sa_plain")))
    for _ in range(3):
        first.enter()
        assert imported("sa_plain").WIDTH == 1
        NO_MODULES.enter()
    assert heard == []
    second.enter()  # the first version is set aside, and may have registered something
    assert len(heard) == 1
    assert imported("sa_plain").WIDTH == 2
    for modules, width in ((first, 1), (second, 2), (NO_MODULES, 0), (first, 1)):
        modules.enter()
        assert not width or width == imported("sa_plain").WIDTH
    assert len(heard) == 1
    brought("3", sa_plain="WIDTH = 3\n").enter()
    assert len(heard) == 2


def test_the_contexts_version_comes_back_after_that_of_a_function() -> None:
    brought("1", sa_plain="WIDTH = 1\n", sa_below="").enter_for_good()
    plain, below = imported("sa_plain"), imported("sa_below")
    brought("2", sa_plain="WIDTH = 2\n").enter()
    assert imported("sa_plain").WIDTH == 2
    assert imported("sa_below") is below
    NO_MODULES.enter()
    assert imported("sa_plain") is plain


class Untouched(dict[str, Any]):
    """Modules that nobody may list."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody walks all modules")

    keys = items = values = copy = __len__ = __iter__


def test_nothing_is_walked_in_a_process_that_no_module_travelled_to() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "modules", Untouched(sys.modules))
        for modules in (CarriedModules({}, {}), brought(sa_plain=""), NO_MODULES):
            modules.enter()
    assert "sa_plain" not in sys.modules


def test_what_is_set_aside_is_bounded_and_what_belongs_together_is_forgotten_together() -> None:
    """Otherwise an edited module would fill a library that lives for weeks; half of a package would be made twice."""
    shelf = ModulesSetAside(most=2, most_of_a_name=2)

    def put(version: str, *names: str) -> None:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
        shelf.set_aside(dict.fromkeys(names, version), travelled=names)
        assert not set(names) & set(sys.modules)

    put("1", "sa_a", "sa_b", "sa_c")
    put("1", "sa_d")
    assert len(shelf) == 4
    put("1", "sa_e")
    assert shelf.names() == {"sa_d", "sa_e"}
    put("1", *(f"sa_{number}" for number in range(99)))
    assert len(shelf) == 100
    shelf = ModulesSetAside(most=20, most_of_a_name=2)
    for version in ("1", "2", "3"):
        put(version, "sa_d", "sa_e")
        put(version, f"sa_{version}")
    assert ("sa_d", "1") not in shelf
    assert len(shelf) == 7


def test_calls_in_threads_find_what_each_brought_until_they_leave() -> None:
    ours, theirs = brought(sa_ours="WHOSE = 'ours'\n"), brought(sa_theirs="WHOSE = 'theirs'\n")
    with ThreadPoolExecutor(1) as slot:
        slot.submit(theirs.enter).result(20)
        there = slot.submit(imported, "sa_theirs").result(20)
        ours.enter()
        here = imported("sa_ours")
        assert sys.modules["sa_theirs"] is there  # its call runs
        found: list[Any] = []
        helper = threading.Thread(target=lambda: found.extend(map(imported, ("sa_ours", "sa_theirs"))))
        helper.start()
        helper.join(20)
        assert found == [here, there]
        slot.submit(leave).result(20)
        ours.enter()
        assert "sa_theirs" not in sys.modules
        slot.submit(theirs.enter).result(20)
        assert slot.submit(imported, "sa_theirs").result(20) is there
        assert sys.modules["sa_ours"] is here


def test_modules_of_a_thread_that_has_ended_are_set_aside() -> None:
    theirs = brought(sa_theirs="")

    def call() -> None:
        theirs.enter()
        imported("sa_theirs")

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(20)
    brought(sa_ours="").enter()
    assert "sa_theirs" not in sys.modules
