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

from stoker.contexts.by_value import LRU_CACHE_TYPE, is_singledispatch_function
from stoker.contexts.function_code import find_attribute_names, find_global_names, may_read_own_files
from stoker.contexts.unpicklable import find_future_kind
from stoker.contexts.user_code import (
    ModuleSource,
    find_by_qualified_name,
    find_module_source,
    is_installed,
    qualified_class_name,
    version_of_package,
)
from stoker.contexts.user_modules import (
    compile_module_source,
    get_linked_package_stamp,
    module_names_imported_by,
    package_of_function,
    relative_import_package,
)
from stoker.errors import RecipeError

_WEAK_CONTAINERS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


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
    if kind in _WEAK_CONTAINERS:
        return kind.__name__, [set(value) if kind is weakref.WeakSet else dict(value)]
    return None


def _is_dense_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")  # use getattr, because another thread may be importing torch right now
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


_MODULE_ATTRIBUTES = frozenset(
    {"__name__", "__file__", "__spec__", "__package__", "__loader__", "__builtins__", "__doc__"}
)
_SKIPPED_CLASS_ATTRIBUTES = frozenset({
    "__module__", "__qualname__", "__dict__", "__weakref__", "__doc__", "_abc_impl", "__firstlineno__",
    "__static_attributes__", "__annotate_func__", "__annotations_cache__", "__slotnames__",
})  # fmt: skip
_MAX_DEPTH = 200


def digest_of(*parts: Any, names: Sequence[str] = ()) -> str:
    """Return one digest (64 hex digits) of several values. `names`: the values' names in a RecipeError."""
    walk = _DigestWalk()
    walk.add_text("stoker-content-3")
    walk.add_text(f"python {sys.version_info.major}.{sys.version_info.minor}")
    for part, name in itertools.zip_longest(parts, names, fillvalue=""):
        walk.visit(part, name)
    return walk.hash.hexdigest()


def digest_of_item(item: Any) -> str:
    """Return a digest (32 hex digits) of a value. Without code in the value, it is the same in all Python versions."""
    walk = _DigestWalk()
    walk.visit(item)
    return walk.hash.hexdigest()[:32]


@functools.lru_cache(maxsize=1024)
def digest_of_code(code: types.CodeType) -> str:
    return digest_of(code)


class _DigestWalk:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._definition_numbers: dict[int, int] = {}
        self._source_numbers: dict[ModuleSource | None, int] = {}
        self._visited_variables: set[tuple[int, frozenset[str]]] = set()
        self._enclosing_containers: list[int] = []
        self._temporary_values: list[Any] = []  # keeps values alive, so that Python does not reuse their ids
        self._path: list[str] = []

    # ---- input of the hash

    def add_bytes(self, tag: str, content: bytes | memoryview) -> None:
        self.hash.update(b"%s:%d:" % (tag.encode(), len(content)))
        self.hash.update(content)

    def add_text(self, text: str) -> None:
        self.add_bytes("str", text.encode("utf-8", "surrogatepass"))

    def add_header(self, tag: str, size: int) -> None:
        self.hash.update(b"%s[%d]" % (tag.encode(), size))

    def visit(self, value: Any, step: str = "") -> None:
        if step:
            self._path.append(step)
        if len(self._enclosing_containers) > _MAX_DEPTH:
            raise RecipeError(f"{self._describe_path() or 'it'} is nested more than {_MAX_DEPTH} deep")
        self._visit_by_type(value)
        if step:
            self._path.pop()

    def _visit_by_type(self, value: Any) -> None:
        kind = type(value)
        if value is None or value is Ellipsis or value is NotImplemented:
            self.add_bytes("const", repr(value).encode())
        elif kind in (bool, int):
            self.add_bytes(kind.__name__, b"%d" % value)
        elif kind is float:
            self.add_bytes("float", struct.pack("<d", value))
        elif kind is complex:
            self.add_bytes("complex", struct.pack("<dd", value.real, value.imag))
        elif kind is str:
            self.add_text(value)
        elif kind in (bytes, bytearray):
            self.add_bytes(kind.__name__, value)
        elif isinstance(value, types.FunctionType):
            visit_content = self._visit_dispatcher if is_singledispatch_function(value) else self._visit_function
            self._visit_definition(value, visit_content, "installed-function")
        elif kind is LRU_CACHE_TYPE:
            self._visit_definition(value, self._visit_cached_function, "installed-function")
        elif isinstance(value, type):
            self._visit_definition(value, self._visit_class, "installed-class")
        elif isinstance(value, types.ModuleType):
            self._visit_definition(value, self._visit_module)
        elif kind is types.CodeType:
            self._visit_code(value)
        else:
            self._visit_container(value, kind)

    def _visit_container(self, value: Any, kind: type) -> None:
        if id(value) in self._enclosing_containers:
            self.add_bytes(
                "up", b"%d" % (len(self._enclosing_containers) - self._enclosing_containers.index(id(value)))
            )
            return
        self._enclosing_containers.append(id(value))
        try:
            if kind in (tuple, list):
                self.add_header(kind.__name__, len(value))
                for index, item in enumerate(value):
                    self.visit(item, f"[{index}]")
            elif kind in (set, frozenset):
                self.add_header(kind.__name__, len(value))
                for one in sorted(digest_of(item) for item in value):
                    self.add_text(one)
            elif kind in (dict, types.MappingProxyType):
                self.add_header("dict", len(value))
                for key, part in value.items():
                    self.visit(key)
                    self.visit(part, f"[{key!r:.40}]")
            else:
                self._visit_object(value, kind)
        finally:
            self._enclosing_containers.pop()

    # ---- definitions: functions, classes, modules

    def _visit_definition(self, value: Any, visit_content: Any, installed: str = "") -> None:
        """Add a definition to the digest; on later visits, add only its number. `installed`: tag for installed code."""
        number = self._definition_numbers.get(id(value))
        if number is not None:
            self.add_bytes("again", b"%d" % number)
            return
        self._definition_numbers[id(value)] = len(self._definition_numbers)
        self._temporary_values.append(value)
        home, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
        if installed and is_installed(home) and find_by_qualified_name(home, name) is value:
            self._add_installed_code(installed, home, name)
        else:
            visit_content(value)

    def _add_installed_code(self, tag: str, home: str, name: str) -> None:
        self.add_header(tag, 3)
        self.add_text(home)
        self.add_text(name)
        self.add_text(version_of_package(home.partition(".")[0]) + get_linked_package_stamp(home))

    def _visit_function(self, function: types.FunctionType) -> None:
        code, name = function.__code__, function.__name__
        self.add_header("function", 7)
        self.add_text(name)
        self._visit_code(code)
        self.visit(function.__defaults__, f" defaults of {name}")
        self.visit(function.__kwdefaults__, f" defaults of {name}")
        cells = function.__closure__ or ()
        self.add_header("closure", len(cells))
        for variable, cell in zip(code.co_freevars, cells, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                self.add_bytes("empty-cell", b"")
            else:
                self.visit(content, f" variable {variable!r} of {name}")
        used = sorted(find_global_names(code) & function.__globals__.keys())
        self.add_header("globals", len(used))
        for variable in used:
            self.add_text(variable)
            value = function.__globals__[variable]
            if variable == "__file__":  # the path matters, because the function may read files next to its module
                self.add_text(os.path.abspath(str(value)))
            elif variable not in _MODULE_ATTRIBUTES:
                self.visit(value, f" global {variable!r} of {name}")
                if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                    self._visit_module_variables(value, find_attribute_names(code))
        self._visit_imported_modules(code, package_of_function(function))
        extra = {attribute: part for attribute, part in vars(function).items() if attribute != "__wrapped__"}
        if extra:
            self.visit(extra, f" attributes of {name}")

    def _visit_cached_function(self, function: Any) -> None:
        self.add_header("cached", 1)
        self.visit(function.__wrapped__)

    def _visit_dispatcher(self, function: Any) -> None:
        self.add_header("dispatcher", len(function.registry))
        for kind, implementation in function.registry.items():
            self.visit(kind)
            self.visit(implementation, f" {function.__name__} of {kind.__name__}")

    def _visit_code(self, code: types.CodeType) -> None:
        self.add_header("code", 11)
        self.add_bytes("bytecode", code.co_code)
        self.add_bytes("exceptions", code.co_exceptiontable)
        for number in (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags):
            self.add_bytes("int", b"%d" % number)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self.add_header("names", len(names))
            for name in names:
                self.add_text(name)
        self.add_header("consts", len(code.co_consts))
        for const in code.co_consts:
            self.visit(const)

    def _visit_class(self, kind: type) -> None:
        self.add_header("class", 4)
        self.add_text(kind.__name__)
        self.visit(type(kind))
        self.visit(kind.__bases__)
        own = {name: part for name, part in vars(kind).items() if name not in _SKIPPED_CLASS_ATTRIBUTES}
        if issubclass(kind, enum.Enum):
            own = {name: member.value for name, member in kind.__members__.items()}
            own.update({name: part for name, part in vars(kind).items() if isinstance(part, types.FunctionType)})
        self.add_header("members", len(own))
        for name in sorted(own):
            self.add_text(name)
            self.visit(own[name], f" {kind.__name__}.{name}")

    def _visit_module(self, module: types.ModuleType) -> None:
        if is_installed(module.__name__):
            self._add_installed_code("installed-module", module.__name__, "")
        else:
            self._visit_source(module.__name__, find_module_source(module.__name__))

    def _visit_module_variables(self, module: types.ModuleType, names: frozenset[str]) -> None:
        if (id(module), names) in self._visited_variables:
            return
        self._visited_variables.add((id(module), names))
        values = {name: vars(module)[name] for name in sorted(names & vars(module).keys() - _MODULE_ATTRIBUTES)}
        for name, value in values.items():
            self.add_text(name)
            depth, path = len(self._enclosing_containers), len(self._path)
            try:
                self.visit(value)
                if isinstance(value, types.ModuleType) and not is_installed(value.__name__):
                    self._visit_module_variables(value, names)
            except RecipeError:  # ignore it: if the value is sent, pickling raises an error
                del self._enclosing_containers[depth:], self._path[path:]

    def _visit_imported_modules(self, code: types.CodeType, package: str) -> None:
        for name in sorted(module_names_imported_by(code, package)):
            if (source := find_module_source(name)) is not None:
                self.add_text(name)
                self._visit_source(name, source)
        self.add_bytes("end", b"")

    def _visit_source(self, name: str, source: ModuleSource | None) -> None:
        if source in self._source_numbers:
            self.add_bytes("source-again", b"%d" % self._source_numbers[source])
            return
        if source is not None:
            self._source_numbers[source] = len(self._source_numbers)
        # Without source code (an extension, or a module created at run time), add only the module's name.
        if source is None or (code := compile_module_source(source)) is None:
            self.add_header("nameless-source", 1)
            self.add_text(name)
            return
        self.add_header("source", 2)
        self.add_text(digest_of_code(code))
        if may_read_own_files(code):
            self.add_text(source.file)
        self._visit_imported_modules(code, relative_import_package(name, is_package=source.is_package))

    # ---- objects

    def _visit_object(self, value: Any, kind: type) -> None:
        if (found := _type_tag_and_parts(value, kind)) is not None:
            self._visit_parts(*found)
        elif kind is getattr(sys.modules.get("numpy"), "ndarray", None) and not value.dtype.hasobject:
            self._visit_parts("array", [str(value.dtype), tuple(value.shape)], data=value.tobytes())
        elif (storage := _storage_bytes(value)) is not None:
            self.add_bytes("storage", storage)
        elif _is_dense_tensor(value):
            facts = [qualified_class_name(kind), str(value.dtype), tuple(value.shape), bool(value.requires_grad)]
            self._visit_parts("tensor", facts, data=_tensor_bytes(value))
        elif future := find_future_kind(value):
            raise RecipeError(
                f"{self._describe_path() or 'it'} is {future}, which can't leave the program; use its result"
            )
        else:
            self._visit_reduced_object(value, kind)

    def _visit_parts(self, tag: str, parts: list[Any], *, data: bytes | None = None) -> None:
        self.add_header(tag, len(parts) + (data is not None))
        for number, part in enumerate(parts):
            if type(part) is str:
                self.add_text(part)
            else:
                self._visit_temporary_value(part, " its object" if tag == "method" and number == 1 else "")
        if data is not None:
            self.add_bytes("data", data)

    def _visit_temporary_value(self, value: Any, step: str) -> None:
        self._temporary_values.append(value)
        self.visit(value, step)

    def _visit_reduced_object(self, value: Any, kind: type) -> None:
        try:
            registered = copyreg.dispatch_table.get(kind)
            reduced: Any = registered(value) if registered is not None else value.__reduce_ex__(4)
        except Exception as error:
            raise RecipeError(
                f"{self._describe_path() or 'it'} is a {qualified_class_name(kind)}, which cannot be sent ({error});"
                " make it inside the loader, or pass what it is made from"
            ) from error
        self.add_header("object", 1)
        if isinstance(reduced, str):
            self.add_text(f"{kind.__module__}.{reduced}")
            return
        state, items, pairs = (list(reduced[2:5]) + [None] * 3)[:3]
        for part in (reduced[0], reduced[1], state, list(items or ()), dict(pairs or ())):
            self._visit_temporary_value(part, f" {kind.__qualname__}")

    def _describe_path(self) -> str:
        return re.sub(r"argument\['?(\w+)'?\]", r"argument \1", "".join(self._path)).strip()
