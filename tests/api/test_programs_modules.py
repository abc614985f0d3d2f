"""A program, its loaders and its functions share the classes and globals of modules next to the program."""

from __future__ import annotations

import pytest

SHAPES = """
import dataclasses
import enum

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass(frozen=True)
class Box:
    side: int

class Settings:
    rate = 1
    names = ["a"]

class Broken(Exception):
    pass

def broken():
    raise Broken("so it is")

def triple(x):
    return 3 * x
"""
STATE = """
MODEL = None
calls = []

def init():
    global MODEL
    MODEL = "loaded"
    calls.append(1)

def use():
    return MODEL

class User:
    def use(self):
        return MODEL
"""
PROGRAM = """
import stoker
import shapes
import state
from shapes import Box, Broken, Color, Settings
from state import use

# ---- one class

@stoker.context
def load_box():
    from shapes import Box
    return Box(3)

@stoker.app
def takes(box, color):
    from shapes import Box, Color
    return isinstance(box, Box), box == Box(3), {Box(3): 1}.get(box), color is Color.RED

@stoker.app
def captures():
    import shapes
    return Box is shapes.Box, Color.RED is shapes.Color.RED

@stoker.app
def gives():
    from shapes import Box, Color
    return Box(3), Color.RED

@stoker.app(context=load_box())
def of_box(loaded):
    return isinstance(loaded, Box), loaded == Box(3)

@stoker.app
def fails():
    import shapes
    shapes.broken()

@stoker.app
def settings():
    import shapes
    return Settings.rate, shapes.Settings.rate, shapes.Settings.names

def classes():
    print(takes(Box(3), Color.RED).result(60))
    print(list(stoker.map(stoker.app(lambda box: takes.function(box, Color.RED)), [Box(3)])))
    print(captures().result(60))
    box, color = gives().result(60)
    print(type(box) is Box, box == Box(3), color is Color.RED)
    print(of_box().result(60))
    try:
        fails().result(60)
    except Broken as error:
        print("caught:", error)
    Settings.rate, Settings.names = 2, ["b"]
    print(settings().result(60))
    print(list(stoker.map(shapes.triple, range(3))))

# ---- one set of globals

@stoker.app
def init_and_use():
    state.init()
    return state.MODEL, state.use(), use(), state.User().use()

@stoker.app
def set_and_use():
    state.MODEL = "set"
    return state.use(), use()

@stoker.context
def load_state():
    state.init()
    return state.MODEL

@stoker.app(context=load_state())
def of_state(loaded):
    return loaded, len(state.calls)

if __name__ == "__main__":
    with stoker.load(progress=False):
        classes()
        print(init_and_use().result(60), set_and_use().result(60), of_state().result(60))
"""
ONE_CLASS = """\
(True, True, 1, True)
[(True, True, 1, True)]
(True, True)
True True True
(True, True)
caught: so it is
(2, 2, ['b'])
[0, 3, 6]
"""
ONE_SET_OF_GLOBALS = "('loaded', 'loaded', 'loaded', 'loaded') ('set', 'set') ('loaded', 0)\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory, run_program_in):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "shapes.py").write_text(SHAPES)
    (folder / "state.py").write_text(STATE)
    return run_program_in(folder, PROGRAM)


def test_class_of_a_neighbouring_module_is_imported_once(done):
    assert done.stdout.startswith(ONE_CLASS), done.stderr


def test_functions_of_a_captured_module_share_its_globals(done):
    assert (done.returncode, done.stdout.removeprefix(ONE_CLASS)) == (0, ONE_SET_OF_GLOBALS), done.stderr
