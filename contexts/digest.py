"""Compute the digest of a value's *content*, including code. The digest is equal in every process.

A walk visits the parts of the value in a fixed order, and adds each part's type, length and content to a SHA-256 hash:

- Code: bytecode, constants, names, nested code; defaults, closure, and each global that the code refers to. The digest
excludes file names, line numbers and the module name. It depends on Python's minor version.
- Installed code: its name and its distribution's version (`user_code`).
- Cycles: for a repeated definition, the number of its first visit; for a container inside itself, the number of nesting
levels.
- Paths, methods, arrays and tensors: their parts. Other objects: `__reduce_ex__`.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import itertools
import os
import pathlib
import re
import struct
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

from stoker.contexts.by_value import CACHED, is_singledispatch_function
from stoker.contexts.function_code import attribute_names, global_names, may_read_own_files
from stoker.contexts.unpicklable import future_kind
from stoker.contexts.user_code import (
    ModuleSource,
    is_installed,
    lookup,
    qualified_class_name,
    source_of,
    version_of_package,
)
from stoker.contexts.user_modules import (
    code_of,
    linked_package_stamp,
    module_names_imported_by,
    package_of_function,
    relative_import_package,
)
from stoker.errors import RecipeError

_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


def _type_tag_and_parts(value: Any, kind: type) -> tuple[str, list[Any]] | None:
    match value:
        case pathlib.PurePath():
            return "path", [str(value)]
        case enum.Enum():
            return "enum", [kind, value.name]
        case types.MethodType():
            return "method", [value.__func__, value.__self__]
        case functools.partial():
            return "partial", [value.func, value.args, value.keywords]
        case types.BuiltinFunctionType() | types.MethodDescriptorType() | types.WrapperDescriptorType():
            owner = getattr(value, "__self__", None)
            name = f"{getattr(value, '__module__', None) or ''}.{value.__qualname__}"
            return "builtin", [name, None if isinstance(owner, types.ModuleType) else owner]
        case types.MemberDescriptorType() | types.GetSetDescriptorType():
            return "slot", [value.__name__]
    if kind in (classmethod, staticmethod):
        return kind.__name__, [value.__func__]
    if kind is property:
        return "property", [value.fget, value.fset, value.fdel]
    if kind is functools.cached_property:
        return "cached-property", [value.func]
    if kind in _WEAK:
        return kind.__name__, [set(value) if kind is weakref.WeakSet else dict(value)]
    return None


def _is_dense_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")  # some names are missing while another thread imports torch
    return (
        type(value) in (getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None))
        and not vars(value)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
    )


def _storage_bytes(value: Any) -> bytes | None:
    torch: Any = sys.modules.get("torch")
    plain: Any = value._untyped_storage if type(value) is getattr(torch, "TypedStorage", None) else value
    untyped: Any = getattr(torch, "UntypedStorage", ())
    if not isinstance(plain, untyped):
        return None
    return _tensor_bytes(torch.empty(0, dtype=torch.uint8).set_(plain.cpu()))


def _tensor_bytes(value: Any) -> bytes:
    torch = sys.modules["torch"]
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


_MODULE_NAMES = frozenset({"__name__", "__file__", "__spec__", "__package__", "__loader__", "__builtins__", "__doc__"})
_CLASS_MACHINERY = frozenset({
    "__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "_abc_impl", "__firstlineno__",
    "__static_attributes__", "__annotate_func__", "__annotations_cache__", "__slotnames__",
})  # fmt: skip
_DEEPEST = 200


def digest_of(*parts: Any, names: Sequence[str] = ()) -> str:
    """Return a digest (64 hex digits) of values. `names`: names of the values for a RecipeError."""
    walk = _DigestWalk()
    walk.text("stoker-content-3")
    walk.text(f"python {sys.version_info.major}.{sys.version_info.minor}")
    for part, name in itertools.zip_longest(parts, names, fillvalue=""):
        walk.visit(part, name)
    return walk.hash.hexdigest()


def digest_of_item(item: Any) -> str:
    """Return a digest (32 hex digits) of an item. If the item contains no code, the digest is the same in all Python
    versions.
    """
    walk = _DigestWalk()
    walk.visit(item)
    return walk.hash.hexdigest()[:32]


@functools.lru_cache(maxsize=1024)
def digest_of_code(code: types.CodeType) -> str:
    return digest_of(code)


class _DigestWalk:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._definitions: dict[int, int] = {}
        self._sources: dict[ModuleSource | None, int] = {}
        self._states: set[tuple[int, frozenset[str]]] = set()
        self._above: list[int] = []
        self._alive: list[Any] = []  # values created by the walk, kept so that Python does not reuse their ids
        self._path: list[str] = []

    # ---- input of the hash

    def raw(self, tag: str, content: bytes | memoryview) -> None:
        self.hash.update(b"%s:%d:" % (tag.encode(), len(content)))
        self.hash.update(content)

    def text(self, text: str) -> None:
        self.raw("str", text.encode("utf-8", "surrogatepass"))

    def open(self, tag: str, size: int) -> None:
        self.hash.update(b"%s[%d]" % (tag.encode(), size))

    def visit(self, value: Any, step: str = "") -> None:
        if step:
            self._path.append(step)
        if len(self._above) > _DEEPEST:
            raise RecipeError(f"{self._where() or 'it'} is nested more than {_DEEPEST} deep")
        self._visit_by_type(value)
        if step:
            self._path.pop()

    def _visit_by_type(self, value: Any) -> None:
        kind = type(value)
        if value is None or value is Ellipsis or value is NotImplemented:
            self.raw("const", repr(value).encode())
        elif kind in (bool, int):
            self.raw(kind.__name__, b"%d" % value)
        elif kind is float:
            self.raw("float", struct.pack("<d", value))
        elif kind is complex:
            self.raw("complex", struct.pack("<dd", value.real, value.imag))
        elif kind is str:
            self.text(value)
        elif kind in (bytes, bytearray):
            self.raw(kind.__name__, value)
        elif isinstance(value, types.FunctionType):
            feed = self._dispatcher if is_singledispatch_function(value) else self._function
            self._definition(value, feed, "installed-function")
        elif kind is CACHED:
            self._definition(value, self._cached_function, "installed-function")
        elif isinstance(value, type):
            self._definition(value, self._class, "installed-class")
        elif isinstance(value, types.ModuleType):
            self._definition(value, self._module)
        elif kind is types.CodeType:
            self._code(value)
        else:
            self._nested(value, kind)

    def _nested(self, value: Any, kind: type) -> None:
        if id(value) in self._above:
            self.raw("up", b"%d" % (len(self._above) - self._above.index(id(value))))
            return
        self._above.append(id(value))
        try:
            if kind in (tuple, list):
                self.open(kind.__name__, len(value))
                for index, item in enumerate(value):
                    self.visit(item, f"[{index}]")
            elif kind in (set, frozenset):
                self.open(kind.__name__, len(value))
                for one in sorted(digest_of(item) for item in value):
                    self.text(one)
            elif kind in (dict, types.MappingProxyType):
                self.open("dict", len(value))
                for key, part in value.items():
                    self.visit(key)
                    self.visit(part, f"[{key!r:.40}]")
            else:
                self._object(value, kind)
        finally:
            self._above.pop()

    # ---- definitions: functions, classes, modules

    def _definition(self, value: Any, feed: Any, installed: str = "") -> None:
        """Add a definition to the digest; on later visits, add only its number. `installed`: tag of installed code."""
        number = self._definitions.get(id(value))
        if number is not None:
            self.raw("again", b"%d" % number)
            return
        self._definitions[id(value)] = len(self._definitions)
        self._alive.append(value)
        home, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
        if installed and is_installed(home) and lookup(home, name) is value:
            self._installed(installed, home, name)
        else:
            feed(value)

    def _installed(self, tag: str, home: str, name: str) -> None:
        self.open(tag, 3)
        self.text(home)
        self.text(name)
        self.text(version_of_package(home.partition(".")[0]) + linked_package_stamp(home))

    def _function(self, function: types.FunctionType) -> None:
        code, name = function.__code__, function.__name__
        self.open("function", 7)
        self.text(name)
        self._code(code)
        self.visit(function.__defaults__, f" defaults of {name}")
        self.visit(function.__kwdefaults__, f" defaults of {name}")
        cells = function.__closure__ or ()
        self.open("closure", len(cells))
        for variable, cell in zip(code.co_freevars, cells, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                self.raw("empty-cell", b"")
            else:
                self.visit(content, f" variable {variable!r} of {name}")
        used = sorted(global_names(code) & function.__globals__.keys())
        self.open("globals", len(used))
        for variable in used:
            self.text(variable)
            value = function.__globals__[variable]
            if variable == "__file__":  # the function may read files next to its module
                self.text(os.path.abspath(str(value)))
            elif variable not in _MODULE_NAMES:
                self.visit(value, f" global {variable!r} of {name}")
                if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                    self._state(value, attribute_names(code))
        self._visit_imported_modules(code, package_of_function(function))
        extra = {attribute: part for attribute, part in vars(function).items() if attribute != "__wrapped__"}
        if extra:
            self.visit(extra, f" attributes of {name}")

    def _cached_function(self, function: Any) -> None:
        self.open("cached", 1)
        self.visit(function.__wrapped__)

    def _dispatcher(self, function: Any) -> None:
        self.open("dispatcher", len(function.registry))
        for kind, implementation in function.registry.items():
            self.visit(kind)
            self.visit(implementation, f" {function.__name__} of {kind.__name__}")

    def _code(self, code: types.CodeType) -> None:
        self.open("code", 11)
        self.raw("bytecode", code.co_code)
        self.raw("exceptions", code.co_exceptiontable)
        for number in (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags):
            self.raw("int", b"%d" % number)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self.open("names", len(names))
            for name in names:
                self.text(name)
        self.open("consts", len(code.co_consts))
        for const in code.co_consts:
            self.visit(const)

    def _class(self, kind: type) -> None:
        self.open("class", 4)
        self.text(kind.__name__)
        self.visit(type(kind))
        self.visit(kind.__bases__)
        own = {name: part for name, part in vars(kind).items() if name not in _CLASS_MACHINERY}
        if issubclass(kind, enum.Enum):
            own = {name: member.value for name, member in kind.__members__.items()}
            own.update({name: part for name, part in vars(kind).items() if isinstance(part, types.FunctionType)})
        self.open("members", len(own))
        for name in sorted(own):
            self.text(name)
            self.visit(own[name], f" {kind.__name__}.{name}")

    def _module(self, module: types.ModuleType) -> None:
        if is_installed(module.__name__):
            self._installed("installed-module", module.__name__, "")
        else:
            self._source(module.__name__, source_of(module.__name__))

    def _state(self, module: types.ModuleType, names: frozenset[str]) -> None:
        if (id(module), names) in self._states:
            return
        self._states.add((id(module), names))
        values = {name: vars(module)[name] for name in sorted(names & vars(module).keys() - _MODULE_NAMES)}
        for name, value in values.items():
            self.text(name)
            depth, path = len(self._above), len(self._path)
            try:
                self.visit(value)
                if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                    self._state(value, names)
            except RecipeError:  # pickling raises the same error if the value is sent
                del self._above[depth:], self._path[path:]

    def _visit_imported_modules(self, code: types.CodeType, package: str) -> None:
        for name in sorted(module_names_imported_by(code, package)):
            if (source := source_of(name)) is not None:
                self.text(name)
                self._source(name, source)
        self.raw("end", b"")

    def _source(self, name: str, source: ModuleSource | None) -> None:
        if source in self._sources:
            self.raw("source-again", b"%d" % self._sources[source])
            return
        if source is not None:
            self._sources[source] = len(self._sources)
        if source is None or (code := code_of(source)) is None:  # an extension module, or a module created at run time
            self.open("nameless-source", 1)
            self.text(name)
            return
        self.open("source", 2)
        self.text(digest_of_code(code))
        if may_read_own_files(code):
            self.text(source.file)
        self._visit_imported_modules(code, relative_import_package(name, is_package=source.is_package))

    # ---- objects

    def _object(self, value: Any, kind: type) -> None:
        if (found := _type_tag_and_parts(value, kind)) is not None:
            self._parts(*found)
        elif kind is getattr(sys.modules.get("numpy"), "ndarray", None) and not value.dtype.hasobject:
            self._parts("array", [str(value.dtype), tuple(value.shape)], data=value.tobytes())
        elif (storage := _storage_bytes(value)) is not None:
            self.raw("storage", storage)
        elif _is_dense_tensor(value):
            facts = [qualified_class_name(kind), str(value.dtype), tuple(value.shape), bool(value.requires_grad)]
            self._parts("tensor", facts, data=_tensor_bytes(value))
        elif future := future_kind(value):
            raise RecipeError(f"{self._where() or 'it'} is {future}, which can't leave the program; use its result")
        else:
            self._visit_reduced_object(value, kind)

    def _parts(self, tag: str, parts: list[Any], *, data: bytes | None = None) -> None:
        self.open(tag, len(parts) + (data is not None))
        for number, part in enumerate(parts):
            if type(part) is str:
                self.text(part)
            else:
                self._visit_made(part, " its object" if tag == "method" and number == 1 else "")
        if data is not None:
            self.raw("data", data)

    def _visit_made(self, value: Any, step: str) -> None:
        self._alive.append(value)
        self.visit(value, step)

    def _visit_reduced_object(self, value: Any, kind: type) -> None:
        try:
            registered = copyreg.dispatch_table.get(kind)
            reduced: Any = registered(value) if registered is not None else value.__reduce_ex__(4)
        except Exception as error:
            raise RecipeError(
                f"{self._where() or 'it'} is a {qualified_class_name(kind)}, which cannot be sent ({error});"
                " make it inside the loader, or pass what it is made from"
            ) from error
        self.open("object", 1)
        if isinstance(reduced, str):
            self.text(f"{kind.__module__}.{reduced}")
            return
        state, items, pairs = (list(reduced[2:5]) + [None] * 3)[:3]
        for part in (reduced[0], reduced[1], state, list(items or ()), dict(pairs or ())):
            self._visit_made(part, f" {kind.__qualname__}")

    def _where(self) -> str:
        return re.sub(r"argument\['?(\w+)'?\]", r"argument \1", "".join(self._path)).strip()
