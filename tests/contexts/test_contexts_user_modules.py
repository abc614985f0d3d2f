from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from new_process import run_python

from stoker.contexts import payloads, user_code, user_modules
from stoker.contexts.digest import digest_of
from stoker.contexts.loading import find_modules_used_by
from stoker.contexts.payloads import dumps_arguments, dumps_code, loads_code, names_of_sent_modules
from stoker.contexts.user_modules import NO_MODULES, SentModules
from stoker.errors import SerializationError

PROGRAM = """
def plain():
    import shapes
    return shapes.SIDES

def below():
    import nets.deep.inner
    return nets.deep.inner.double(nets.deep.inner.WIDTH)

def taken():
    from nets.deep import inner
    return inner.WIDTH

def kind():
    from nets.deep.inner import Layer
    return Layer
"""
FILES = {
    "shapes.py": "import corners\nSIDES = corners.COUNT\n",
    "corners.py": "COUNT = 3\n",
    "nets/__init__.py": "",
    "nets/deep/__init__.py": "",
    "nets/deep/inner.py": "from ..sizes import WIDTH\nclass Layer: pass\ndef double(x):\n    return 2 * x\n",
    "nets/sizes.py": "WIDTH = 7\n",
}


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """Undo the imports of test modules."""
    before, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    own = {"shapes", "corners", "nets", "program", "linked", "cm_pack", "cm_plain", "cm_lazy"}
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in own | {"__editable___linked_finder"}:
            del sys.modules[name]
    sys.path[:], sys.meta_path[:] = path, finders
    user_modules._imported_at.clear()
    user_modules._stamps.clear()
    user_modules.before_replacing = None
    user_modules._finder.clear()


def written(folder: Path, **changed: str) -> Path:
    for name, text in {**FILES, **{key.replace("__", "/") + ".py": text for key, text in changed.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    importlib.invalidate_caches()
    return folder


def made(folder: Path, name: str, code: str = PROGRAM) -> Any:
    """Return a function of a program in this folder without importing files of the folder."""
    program = types.ModuleType("program")
    exec(compile(code, str(folder / "program.py"), "exec"), vars(program))
    sys.modules["program"] = program
    return getattr(program, name)


def packed(folder: Path, name: str, code: str = PROGRAM) -> bytes:
    sys.path.insert(0, str(folder))
    try:
        return dumps_code(made(folder, name, code), what="function")
    finally:
        sys.path.remove(str(folder))


def opened(data: bytes) -> Callable[[], Any]:
    function, modules = loads_code(data)

    def run() -> Any:
        modules.activate()
        return function()

    return run


def test_function_carries_the_modules_that_it_imports(tmp_path: Path) -> None:
    for name in ("plain", "below", "taken"):
        (tmp_path / name).write_bytes(packed(written(tmp_path / "here"), name))
    assert not {"shapes", "corners", "nets"} & set(sys.modules)
    code = """
        from stoker.contexts.payloads import loads_code
        for name in ("plain", "below", "taken"):
            function, _ = loads_code(open(name, "rb").read())
            print(function())
    """
    for file in sorted((tmp_path / "here").rglob("*.py")):
        file.unlink()
    assert run_python(code, cwd=tmp_path) == "3\n14\n7\n"


def test_programs_of_two_folders_each_find_their_own_modules(tmp_path: Path) -> None:
    first = written(tmp_path / "a")
    second = written(tmp_path / "b", corners="COUNT = 4\n", nets__sizes="WIDTH = 9\n")
    data = [packed(folder, name) for name in ("plain", "below", "taken") for folder in (first, second)]
    functions = [opened(each) for each in data]
    for _ in range(2):
        assert [function() for function in functions] == [3, 4, 14, 18, 7, 9]


def test_module_that_reads_nearby_files_belongs_to_its_folder(tmp_path: Path) -> None:
    reads = "from pathlib import Path\nSIDES = (Path(__file__).parent / 'sides').read_text()\n"
    folders = [written(tmp_path / name, shapes=reads) for name in ("a", "b")]
    for folder in folders:
        (folder / "sides").write_text(folder.name)
    keys = set()
    for folder in folders:
        sys.path.insert(0, str(folder))
        keys.add(digest_of(made(folder, "plain")))
        sys.path.remove(str(folder))
    assert len(keys) == 2
    functions = [opened(data) for data in [packed(folder, "plain") for folder in folders]]
    assert [function() for function in functions * 2] == ["a", "b"] * 2


def test_edited_file_is_imported_again_and_other_files_are_not(tmp_path: Path) -> None:
    folder = written(tmp_path)
    before = opened(packed(folder, "kind"))()
    written(folder, nets__deep__inner="# the width is that of the paper\n" + FILES["nets/deep/inner.py"])
    assert opened(packed(folder, "kind"))() is before
    written(folder, nets__sizes="WIDTH = 8\n")
    assert opened(packed(folder, "kind"))() is not before
    assert opened(packed(folder, "below"))() == 16


def test_functions_of_several_slots_find_their_own_modules(tmp_path: Path) -> None:
    function, modules = loads_code(packed(written(tmp_path), "plain"))
    begun, goes_on = threading.Event(), threading.Event()

    def first() -> Any:
        modules.activate()
        begun.set()
        assert goes_on.wait(20)
        return function()

    with ThreadPoolExecutor(1) as slots:
        waiting = slots.submit(first)
        assert begun.wait(20)
        NO_MODULES.activate()
        goes_on.set()
        assert waiting.result(20) == 3


def brought(version: str = "1", **sources: str) -> SentModules:
    """Return `SentModules` with these sources. `__` stands for a dot; a module with submodules is a package."""
    named = {name.replace("__", "."): text for name, text in sources.items()}
    table = {
        name: (f"/nowhere/{name}.py", any(other.startswith(f"{name}.") for other in named), version, text.encode())
        for name, text in named.items()
    }
    return SentModules(table, {})


def imported(name: str) -> Any:
    return importlib.import_module(name)


def test_module_is_kept_while_calls_bring_no_other_version() -> None:
    brought(cm_plain="WIDTH = 1\n").activate()
    plain = imported("cm_plain")
    NO_MODULES.activate()
    brought(cm_pack="").activate()
    brought(cm_plain="WIDTH = 1\n").activate()
    assert imported("cm_plain") is plain


def test_other_version_replaces_a_package_with_its_submodules() -> None:
    ours, theirs = (
        brought(version, cm_pack="", cm_pack__part=f"COUNT = {version}\n", cm_plain="") for version in ("1", "2")
    )
    for modules, count in ((ours, 1), (theirs, 2), (ours, 1)):
        modules.activate()
        assert imported("cm_pack.part").COUNT == count  # noqa: SIM300
        assert imported("cm_pack").part.COUNT == count  # noqa: SIM300
        beside: Any = types.ModuleType("cm_pack.beside")
        assert not hasattr(sys.modules["cm_pack"], "beside")
        sys.modules["cm_pack.beside"] = sys.modules["cm_pack"].beside = beside  # type: ignore[attr-defined]


def test_module_is_imported_again_after_user_code_changed_it() -> None:
    sys.modules["cm_plain"] = types.ModuleType("cm_plain")
    brought(cm_plain="WIDTH = 1\n").activate()
    assert imported("cm_plain").WIDTH == 1, "a module found elsewhere is dropped"
    for word in ("ours", "theirs"):
        source = f"import sys\nclass Lazy:\n    word = {word!r}\nsys.modules[__name__] = Lazy()\n"
        brought(word, cm_lazy=source).activate()
        assert imported("cm_lazy").word == word, "a module that replaces itself is replaced, too"
    ours = brought(cm_pack="", cm_pack__part="")
    ours.activate()
    part = imported("cm_pack.part")
    del sys.modules["cm_pack.part"]
    ours.activate()
    assert imported("cm_pack.part") is not part


def test_hook_runs_before_a_module_version_is_replaced() -> None:
    asked: list[str] = []
    user_modules.before_replacing = lambda: asked.append("asked")
    versions = [brought(str(width), cm_plain=f"WIDTH = {width}\n") for width in range(3)]
    before = user_modules.count_replacements()
    for modules in (versions[0], versions[0]):
        modules.activate()
        imported("cm_plain")
    NO_MODULES.activate()
    assert not asked
    versions[1].activate()
    assert imported("cm_plain").WIDTH == 1
    assert len(asked) == 1
    versions[2].activate()
    assert len(asked) == 2
    assert user_modules.count_replacements() == before + 1


def test_function_finds_only_the_modules_that_it_brought() -> None:
    user_modules.before_replacing = lambda: pytest.fail("nothing is replaced")
    ours, others = brought("1", cm_pack__part="", cm_plain="", cm_pack=""), brought("2", cm_other="")
    ours.activate()
    plain, part = imported("cm_plain"), imported("cm_pack.part")
    others.activate()
    imported("cm_other")
    for name in ("cm_plain", "cm_pack.part"):
        with pytest.raises(ModuleNotFoundError):
            imported(name)
    ours.activate()
    assert imported("cm_plain") is plain
    assert imported("cm_pack").part is imported("cm_pack.part") is part
    with pytest.raises(ModuleNotFoundError):
        imported("cm_other")


def test_module_of_the_context_is_restored_as_the_same_object() -> None:
    user_modules.before_replacing = lambda: pytest.fail("a fresh library would have the same conflict")
    brought("1", cm_plain="WIDTH = 1\n", cm_pack="", cm_pack__part="").set_as_context_modules()
    plain, part = imported("cm_plain"), imported("cm_pack.part")
    for _ in range(2):
        brought("2", cm_plain="WIDTH = 2\n", cm_pack="", cm_pack__part="").activate()
        assert imported("cm_plain").WIDTH == 2
        assert imported("cm_pack.part") is not part
        NO_MODULES.activate()
        assert imported("cm_plain") is plain
        assert imported("cm_pack").part is imported("cm_pack.part") is part


ARGUMENTS = """
class Model:
    def sides(self):
        import shapes
        return shapes.SIDES
"""


def test_arguments_carry_the_modules_of_their_methods(tmp_path: Path) -> None:
    sys.path.insert(0, str(written(tmp_path)))
    model = made(tmp_path, "Model", ARGUMENTS)()
    brought: set[str] = set()
    data = dumps_arguments(((model,), {}), brought=brought)
    assert brought == {"shapes", "corners"}
    names = frozenset(brought)
    brought.clear()
    function = dumps_code(lambda model: model.sides(), what="function", also=names)
    assert names_of_sent_modules(function) == names
    light = dumps_arguments(((model,), {}), by_name=names, brought=brought)
    assert not brought
    assert light[:1] != b"M"
    sys.path.remove(str(tmp_path))
    (arguments, _), modules = loads_code(data)
    modules.activate()
    assert arguments[0].sides() == 3
    for name in names:
        del sys.modules[name]
    call, modules = loads_code(function)
    assert call(payloads.loads(light)[0][0]) == 3


def test_context_modules_are_found_after_those_of_a_function(tmp_path: Path) -> None:
    _, modules = loads_code(packed(written(tmp_path), "plain"))
    modules.set_as_context_modules()
    opened(packed(written(tmp_path), "below"))
    assert importlib.import_module("shapes").SIDES == 3
    opened(dumps_code(len, what="function"))
    assert importlib.import_module("corners").COUNT == 3


def test_oversized_source_is_not_sent_and_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(user_modules, "MAX_SOURCE_BYTES", 20)
    data = packed(written(tmp_path), "plain")
    assert data[:1] != b"M"
    assert "have more than 20 B of source code and are not sent with the function" in caplog.text


def test_unreadable_source_is_not_sent(tmp_path: Path) -> None:
    folder = written(tmp_path, corners="COUNT = = 3\n")
    (folder / "nets" / "deep" / "inner.py").unlink()
    function = opened(packed(folder, "plain"))
    with pytest.raises(ModuleNotFoundError, match="corners"):
        function()
    with pytest.raises(ModuleNotFoundError, match=r"nets\.deep\.inner"):
        opened(packed(folder, "below"))()


def test_folders_without_init_and_package_data_files_are_sent(tmp_path: Path) -> None:
    folder = written(
        tmp_path, nets__plain__leaf="from importlib.resources import files\nTEXT = files('nets') / 'text'\n"
    )
    (folder / "nets" / "text").write_text("beside")
    code = "def read():\n    from nets.plain import leaf\n    return leaf.TEXT.read_text()\n"
    assert opened(packed(folder, "read", code))() == "beside"


def test_truncated_serialized_code_is_refused(tmp_path: Path) -> None:
    data = packed(written(tmp_path), "plain")
    for size in (1, 7, 9, 40):
        with pytest.raises(SerializationError, match="damaged or truncated"):
            loads_code(data[:size])


@pytest.mark.parametrize("name", ["below", "taken"])
def test_code_digest_changes_when_an_imported_submodule_changes(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    sys.path.insert(0, str(folder))
    before = digest_of(made(folder, name))
    written(folder, nets__sizes="WIDTH = 7  # as before\n")
    assert digest_of(made(folder, name)) == before
    written(folder, nets__sizes="WIDTH = 8\nraise SystemExit('it was run')\n")
    assert digest_of(made(folder, name)) != before


def test_pilot_does_not_preload_modules_of_the_user(tmp_path: Path) -> None:
    folder = written(tmp_path)
    sys.path.insert(0, str(folder))
    assert find_modules_used_by(made(folder, "kind")) == ()


FINDER = """
import importlib.util, sys
MAPPING = {{"linked": {place!r}}}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return importlib.util.spec_from_file_location(name, MAPPING[name] + "/__init__.py")
sys.meta_path.append(Finder)
"""


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a package installed by an import hook, like editable packages of setuptools."""
    place = tmp_path / "project" / "linked"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("from linked.inner import WIDTH\ndef width():\n    return WIDTH\n")
    (place / "inner.py").write_text("WIDTH = 7\n")
    finder = types.ModuleType("__editable___linked_finder")
    sys.modules[finder.__name__] = finder
    exec(FINDER.format(place=str(place)), vars(finder))
    return place


def edit(file: Path, text: str) -> None:
    """Rewrite a file with a later modification time, and clear the recorded modification times."""
    file.write_text(text)
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 10**9))
    user_modules._stamps.clear()


def test_edited_editable_package_is_imported_again(linked: Path) -> None:
    width = importlib.import_module("linked").width
    assert user_code.is_installed("linked")
    assert opened(dumps_code(width, what="function"))() == 7
    kind = sys.modules["linked"]
    assert opened(dumps_code(width, what="function"))() == 7
    assert sys.modules["linked"] is kind
    before = digest_of(width)
    edit(linked / "inner.py", "WIDTH = 8\n")
    again = opened(dumps_code(sys.modules["linked"].width, what="function"))
    assert again() == 8
    assert digest_of(sys.modules["linked"].width) != before


TARGET = {
    "boxed/__init__.py": "def double(x):\n    return 2 * x\n",
    "single.py": "ONE = 1\n",
    "beside.py": "TWO = 2\n",
    "boxed/own.py": "THREE = 3\n",
    "boxed-1.0.dist-info/RECORD": "boxed/__init__.py,,\nsingle.py,sha256=0,8\n../bin/boxed,,\na,,\n",
}


@pytest.fixture
def target(tmp_path: Path) -> str:
    """Return a folder into which pip installed `boxed` and `single`."""
    for name, text in TARGET.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(text)
    return str(tmp_path / "site")


def test_packages_in_a_pip_target_folder_count_as_installed(target: str, tmp_path: Path) -> None:
    """Users combine `pip install --target` with PYTHONPATH. Compiled packages cannot be sent by value."""
    said = run_python(INSTALLED, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join([target, *sys.path])})
    assert said.split() == ["True", "True", "False", "False", "True", "False"]


def test_pip_packages_in_a_pth_folder_do_not_count_as_editable(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only linked (editable) packages are imported again after an edit. Stoker itself may be in a linked folder."""
    monkeypatch.syspath_prepend(target)
    monkeypatch.setattr(user_code, "_linked_roots", lambda: (target + os.sep,))
    assert [user_code.is_linked_package(name) for name in ("boxed", "single", "beside")] == [False, False, True]
    assert not any(user_code.is_linked_package(name) for name in ("stoker", "numpy", "json", "__main__", "no_such"))


INSTALLED = """
import beside, boxed.own, single
from stoker.contexts.user_code import is_installed, find_module_source
names = ("boxed", "single", "beside", "boxed.own")
print(*map(is_installed, names), find_module_source("boxed") is None, find_module_source("beside") is None)
"""


def test_package_search_works_in_a_deleted_working_folder(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = "import os; os.rmdir(os.getcwd())\nfrom stoker.contexts.user_code import folders_installed_by_pip\n"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run_python(code + "print(list(folders_installed_by_pip()))", cwd=tmp_path / "gone", env=environ)
