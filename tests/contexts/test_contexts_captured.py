"""What a function captured, and whether it has changed since: every place that a function takes values from."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref

import pytest

import stoker
from stoker.contexts.captured import CapturedState, changed_since_made


def namespace(source: str) -> dict:
    names = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("source", "change", "name"),
    [
        ("scale = 1\ndef use(): return scale", "scale = 2", "scale"),
        ("scale = 1\ndef use(): return scale", "scale = 1.0", "scale"),
        ("scale = 0.0\ndef use(): return scale", "scale = -0.0", "scale"),
        ("scale = [[1]]\ndef use(): return scale", "scale[0][0] = 2", "scale"),
        ("def use(): return scale", "scale = 2", "scale"),
        ("scale = 1\ndef use(): return scale", "del scale", "scale"),
        ("scale = 1\ndef helper(): return scale\ndef use(): return helper()", "scale = 2", "scale"),
        ("def helper(): return 1\ndef use(): return helper()", "def helper(): return 2", "helper"),
        ("def helper(): return 1\ndef use(): return helper()", "helper.__code__ = (lambda: 2).__code__", "helper"),
        ("def use(): return 1", "use.__code__ = (lambda: 2).__code__", "use"),
        ("def use(x, items=[]): return items", "use.__defaults__[0].append(1)", "items"),
        ("def use(x=1, y=2): return y", "use.__defaults__ = (1, 3)", "y"),
        ("def use(x=1, y=2): return y", "use.__defaults__ = ()", "x"),
        ("def use(*, items=[]): return items", "use.__kwdefaults__['items'].append(1)", "items"),
        ("def use(*, rate=1): return rate", "use.__kwdefaults__['rate'] = 2", "rate"),
        ("def helper(items=[]): return items\ndef use(): return helper()", "helper.__defaults__[0].append(1)", "items"),
        ("def use(): return use.rate\nuse.rate = 1", "use.rate = 2", "the attributes of use"),
        ("def use(): return use.rate", "use.rate = 2", "the attributes of use"),
        ("class Config: rate = 1\ndef use(): return Config.rate", "Config.rate = 2", "Config"),
        ("class Config: rate = 1\nconfig = Config()\ndef use(): return config.rate", "Config.rate = 2", "config"),
        ("class Config: rate = 1\nconfig = Config()\ndef use(): return config.rate", "config.rate = 2", "config"),
        ("rate = 1\nclass Model:\n def run(self): return rate\ndef use(): return Model().run()", "rate = 2", "rate"),
        ("rate = 1\nclass M:\n @staticmethod\n def run(): return rate\nm = M()\ndef use(): m", "rate = 2", "rate"),
        ("rate = 1\nclass M:\n @property\n def run(self): return rate\nm = M()\ndef use(): m", "rate = 2", "rate"),
        (
            "import functools\nrate = 1\ndef part(x): return rate\nhelper = functools.partial(part, 1)\n"
            "def use(): return helper()",
            "rate = 2",
            "rate",
        ),
        *((f"{start}\ndef use(): return made", "rate = 2", "rate") for start in (
            "from functools import *\nrate = 1\n@cache\ndef made(): return rate",
            "from functools import *\nrate = 1\n@singledispatch\ndef made(x): return 1\n@made.register\n"
            "def _(x: int): return rate",
            "from functools import *\nrate = 1\nclass M:\n @cached_property\n def run(self): return rate\nmade = M()",
            "from functools import *\nrate = 1\nclass M:\n @lru_cache\n def run(self): return rate\nmade = M()",
            "from functools import *\nrate = 1\nclass M:\n @singledispatchmethod\n def run(self, x): return 1\n"
            " @run.register\n def _(self, x: int): return rate\nmade = M()",
        )),
        (
            "import functools\n@functools.singledispatch\ndef show(x): return 1\ndef use(): return show(1)",
            "show.register(int, lambda x: 2)",
            "show",
        ),
    ],
)  # fmt: skip
def test_the_name_that_changed_is_told(source, change, name):
    names = namespace(source)
    use = names["use"]
    captured = CapturedState(use)
    assert captured.changed(use) == ""
    exec(change, names)
    assert captured.changed(use) == name
    assert CapturedState(use).changed(use) == ""


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("def use(x): return x.scale\nscale = 1", "scale = 2"),  # an attribute's name is no global
        ("scale = float('nan')\ndef use(): return scale", "scale = float('nan')"),
        ("scale = [1]\ndef use(): return scale", "scale = [1]"),
        ("import sys\ndef use(): return sys.path", "sys.stoker_marker = 1"),
        ("def use(): return 1", "other = 2"),
        ("import functools\n@functools.cache\ndef made(x): return x\ndef use(): return made(1)", "made(1)"),
        ("import functools\n@functools.singledispatch\ndef made(x): return x\ndef use(): return made(1)", "made(1)"),
    ],
)
def test_what_does_not_matter_is_no_change(source, change):
    names = namespace(source)
    captured = CapturedState(names["use"])
    exec(change, names)
    assert captured.changed(names["use"]) == ""


def test_a_variable_of_an_enclosing_function_that_changes_in_place_is_seen():
    def make():
        config = types.SimpleNamespace(rates=[1])

        def use():
            return config

        return config, use

    config, use = make()
    captured = CapturedState(use)
    assert captured.changed(use) == ""
    config.rates.append(2)
    assert captured.changed(use) == "config"


def test_the_globals_of_a_users_module_are_seen(monkeypatch):
    module = types.ModuleType("stoker_test_settings")
    module.rate = 1
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = namespace("def use(): return settings.rate")
    names["settings"] = module
    captured = CapturedState(names["use"])
    assert captured.changed(names["use"]) == ""
    module.rate = 2
    assert captured.changed(names["use"]) == "settings"


def test_an_installed_module_that_imports_its_parts_when_they_are_asked_for_has_not_changed():
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise SystemExit("code of the module ran")

    names = namespace("def use(): return library, held")
    names["library"] = Lazy("json")
    names["held"] = [names["library"]]
    captured = CapturedState(names["use"])
    names["library"].part = [1]
    assert captured.changed(names["use"]) == ""


def add(rates, x):
    return rates, x


class Scaler:
    def __init__(self):
        self.rates = [1]

    def __call__(self, x):
        return self.rates


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: functools.partial(add, [1]), lambda v: v.args[0].append(2)),
        (Scaler, lambda v: v.rates.append(2)),
        (lambda: type("Made", (Scaler,), {"rates": [1]}), lambda v: v.rates.append(2)),
    ],
)
def test_a_partial_or_an_object_that_is_called_is_seen(make, change):
    function = make()
    captured = CapturedState(function)
    assert captured.changed(function) == ""
    change(function)
    assert captured.changed(function) == "what it holds"


def test_a_cached_and_a_dispatching_function_that_are_called_themselves_are_seen():
    names = namespace(
        "import functools\nrate = 1\n@functools.cache\ndef cached(): return rate\n"
        "@functools.singledispatch\ndef show(x): return 1\n@show.register\ndef _(x: int): return rate"
    )
    known = [(names[name], CapturedState(names[name])) for name in ("cached", "show")]
    assert [captured.changed(function) for function, captured in known] == ["", ""]
    names["rate"] = 2
    assert [captured.changed(function) for function, captured in known] == ["rate", "rate"]


def test_a_captured_object_is_not_asked_for_attributes():
    class Asker:
        def __getattr__(self, name):
            raise KeyError(name)

    names = namespace("def use(): return asker")
    names["asker"] = Asker()
    captured = CapturedState(names["use"])
    assert captured.changed(names["use"]) == ""
    names["asker"] = Asker()
    assert captured.changed(names["use"]) == "asker"


def test_a_function_that_its_own_values_hold_is_let_go():
    names = namespace(
        "class Registry: pass\nregistry = Registry()\ntable = {}\n"
        "def use(items=[]): return registry, table\nregistry.use = table['use'] = use\nuse.me = use\n"
    )
    use = names["use"]
    captured = CapturedState(use)
    gone = weakref.ref(use)
    del use
    names.clear()
    gc.collect()
    assert gone() is None
    assert captured


def test_a_loader_whose_settings_changed_in_place_is_known_by_its_recipe():
    names = namespace(
        "import stoker\nclass Settings: size = 1\nsettings = {'layers': [1]}\n"
        "@stoker.context\ndef table(): return Settings.size, settings\n"
    )
    recipe = names["table"]()
    assert changed_since_made(recipe.key) == ""
    names["settings"]["layers"].append(2)
    assert changed_since_made(recipe.key) == "settings"
    again = names["table"]()
    assert changed_since_made(again.key) == ""
    names["Settings"].size = 2
    assert changed_since_made(again.key) == "Settings"
    assert isinstance(again, stoker.contexts.recipe.Recipe)


def test_a_loader_that_is_a_partial_is_known_by_its_recipe():
    loader = functools.partial(add, [1])
    recipe = stoker.contexts.recipe_of(loader, (2,))
    assert changed_since_made(recipe.key) == ""
    loader.args[0].append(2)
    assert changed_since_made(recipe.key) == "what it holds"
