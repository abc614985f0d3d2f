"""Convert arguments, results, functions and exceptions to bytes (`payload_layout`). Only libraries and the client
unpickle these bytes.

A class that is pickled by value includes its attributes. With `keep_classes`, these attributes do not overwrite those
of a class that this process already has. If several threads unpickle a new class, one of them sets its attributes.
"""

from __future__ import annotations

import functools
import io
import mmap
import pickle
import re
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from cloudpickle import cloudpickle as _cloudpickle

from stoker.contexts.by_value import ByValuePickler, OpenHandleError, class_by_name, is_small_builtin
from stoker.contexts.digest import digest_of_code
from stoker.contexts.function_code import unwrap_partial
from stoker.contexts.payload_layout import (
    PLAIN,
    WITH_BUFFERS,
    WITH_MODULES,
    Buffer,
    extract_module_table,
    join_parts,
    split_payload,
)
from stoker.contexts.unpicklable import explain_pickling_error
from stoker.contexts.user_code import is_installed, qualified_class_name
from stoker.contexts.user_modules import (
    NO_MODULES,
    SentModules,
    Table,
    collect_user_modules,
    get_linked_package_stamps,
    modules_imported_when_run,
)
from stoker.errors import RemoteCallError, SerializationError

_CLASS_BY_VALUE = re.compile(rb"class_(?:setstate|by_name)")
_unfilled: weakref.WeakSet[type] = weakref.WeakSet()
_fill_lock = threading.RLock()
"""Lock for setting attributes of unpickled classes. A thread never holds it while unpickling other values."""


class _ClassUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        instead = _REPLACEMENTS.get((module.partition(".")[0], name))
        return instead if instead is not None else super().find_class(module, name)


def _find_or_create_class(make: Callable[..., Any], *parts: Any) -> Any:
    identity = parts[-2]
    with _cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        found = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if found is not None:
        return found
    made = make(*parts[:-2], None, parts[-1])
    _unfilled.add(made)  # mark the class before other threads can find it
    return _cloudpickle._lookup_class_or_track(identity, made)


def _set_attributes(kind: Any, state: Any) -> Any:
    with _fill_lock:
        if kind in _unfilled:
            _cloudpickle._class_setstate(kind, state)
            _unfilled.discard(kind)
    return kind


_REPLACEMENTS: dict[tuple[str, str], Callable[..., Any]] = {
    ("cloudpickle", "_make_skeleton_class"): functools.partial(
        _find_or_create_class, _cloudpickle._make_skeleton_class
    ),
    ("cloudpickle", "_make_skeleton_enum"): functools.partial(_find_or_create_class, _cloudpickle._make_skeleton_enum),
    ("cloudpickle", "_class_setstate"): _set_attributes,
    ("stoker", "class_by_name"): lambda module, name, _attributes: class_by_name(module, name, {}),
}


BIG_BUFFER_BYTES = 16_384

_MAX_PLAIN_DEPTH = 4


def pickle_if_small_builtin(value: Any) -> bytes | None:
    return pickle.dumps(value, 5) if is_small_builtin(value, _MAX_PLAIN_DEPTH) else None


def dumps(value: Any, *, what: str = "argument") -> bytes:
    """Return the bytes of a value. Raises a SerializationError that names `what` and the unpicklable part."""
    if is_small_builtin(value, _MAX_PLAIN_DEPTH):
        return pickle.dumps(value, 5)
    return b"".join(dump_parts(value, what=what))


def dump_parts(value: Any, *, what: str = "argument") -> list[Buffer]:
    body, buffers = _pickle_value(value, what=what)
    return join_parts(WITH_BUFFERS, body, buffers) if buffers else [body]


def loads(data: Buffer, *, keep_classes: bool = False) -> Any:
    """Return the value that `dumps` received. Writable arrays in writable `data` are views.

    With `keep_classes`, classes of this process keep their attributes. Raises SerializationError, and exceptions of
    unpickling.
    """
    body, *buffers = [data] if data[:1] == PLAIN else split_payload(data)
    if keep_classes and _CLASS_BY_VALUE.search(body) is not None:
        return _ClassUnpickler(io.BytesIO(body), buffers=buffers).load()
    return pickle.loads(body, buffers=buffers)


def is_interrupt(error: BaseException) -> bool:
    """True if Ctrl-C or a signal handler of the program raised the exception."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    functions = [unwrap_partial(signal.getsignal(number)) for number in signal.valid_signals()]
    handlers = {getattr(function, "__code__", None) for function in functions}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _pickle_value(
    value: Any, *, what: str, modules: set[str] | None = None, by_name: frozenset[str] = frozenset()
) -> tuple[bytes, list[memoryview]]:
    """Return the pickle of a value, and its buffers.

    Adds names of needed modules to `modules`. Classes of the modules `by_name` are pickled by name.
    """
    buffers: list[memoryview] = []

    def is_kept_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # the buffer is not contiguous
            return True
        if raw.nbytes >= BIG_BUFFER_BYTES:
            buffers.append(raw)
        return raw.nbytes < BIG_BUFFER_BYTES

    def pickle_with_options(joined: list[ModuleType], **options: Any) -> tuple[list[ModuleType], bytes]:
        buffers.clear()
        with io.BytesIO() as file:
            pickler = ByValuePickler(file, protocol=5, buffer_callback=is_kept_in_pickle, **options)
            pickler.share_module_globals(joined)
            pickler.dump(value)
            if modules is not None:
                modules.update(modules_imported_when_run(pickler.functions) | pickler.modules_by_name)
            return pickler.modules, file.getvalue()

    try:
        try:
            joined, body = pickle_with_options([], by_name=by_name)
            return pickle_with_options(joined, by_name=by_name)[1] if joined else body, buffers
        except OpenHandleError:  # do not retry by name: when a library imports the module, this may truncate the file
            raise
        except Exception:
            # A function pickled by value includes its module's globals, for example an unpicklable lock. Pickling by
            # name may still work, if the module is sent or can be imported on the pilot.
            if not _has_user_code(value):
                raise
        return pickle_with_options([], prefers_names=True)[1], buffers
    except Exception as error:
        raise SerializationError(explain_pickling_error(value, error, what=what), what=what) from error


def _has_user_code(value: Any) -> bool:
    parts = (value, *value) if isinstance(value, tuple | list) else (value,)
    homes = {getattr(part, "__module__", None) or type(part).__module__ for part in parts}
    return any(isinstance(home, str) and home != "__main__" and not is_installed(home) for home in homes)


class RemoteTraceback(Exception):
    """The traceback of an exception in a library, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the library:\n\n{self.text}"


def dump_exception(error: BaseException) -> bytes:
    """Return the bytes of an exception with its traceback as text. Never raises."""
    kind = type(error)
    try:
        message = str(error)
    except Exception as worse:
        message = f"(its message could not be made: {worse!r})"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as worse:
        text = f"{kind.__qualname__}: {message}\n(its traceback could not be made: {worse!r})\n"
    return pickle.dumps((qualified_class_name(kind), message, text, _pickle_exception(error)), 5)


def load_exception(data: Buffer) -> BaseException:
    """Return the exception that `dump_exception` received, caused by a RemoteTraceback.

    An exception that cannot be rebuilt or shown becomes a RemoteCallError (Parsl needs the `repr`).
    """
    kind, message, text, body = pickle.loads(data)
    error: BaseException | None = None
    why = "it could not be pickled in the library"
    if body:
        try:
            found = _restore_exception_message(message, _rebuild_exception(loads(body, keep_classes=True)))
            repr(found)
            error = found if isinstance(found, BaseException) else None
        except BaseException as failure:  # user code runs here and may raise SystemExit
            if is_interrupt(failure):
                raise
            why = f"it cannot be rebuilt here: {type(failure).__name__}: {failure}"
    error = error or RemoteCallError(f"{kind}: {message}\n({why})", kind=kind, traceback=text)
    error.__cause__ = RemoteTraceback(text)
    return error


def _restore_exception_message(message: str, error: Any) -> Any:
    """Call the exception's class again if this restores the message, which unpickling without `__init__` may lose."""
    try:
        if str(error) == message:
            return error
        again = type(error)(*error.args)
        vars(again).update(vars(error))
    except Exception:
        return error
    return again if str(again) == message else error


def _pickle_exception(error: BaseException) -> bytes:
    with suppress(Exception):
        whole = dumps((error, type(error), (), {}), what="exception")
        # Unpickle as a test, which fails if `__init__` requires other arguments than `args`.
        loads(whole, keep_classes=True)
        return whole
    kept, lost = {}, []
    for name, value in vars(error).items():
        try:
            dumps(value)
            kept[name] = value
        except Exception:
            lost.append(name)
    if lost:
        note = f"attributes left in the library, because they can't be pickled: {', '.join(lost)}"
        kept["__notes__"] = [*kept.get("__notes__", ()), note]
    args: Any = error.args
    with suppress(Exception):
        if isinstance(error, BaseExceptionGroup):
            args = error.message, [dump_exception(member) for member in error.exceptions]
        return dumps((None, type(error), args, kept), what="exception")
    return b""


def _rebuild_exception(parts: Any) -> Any:
    error, kind, args, attributes = parts
    if error is not None:
        return error
    if issubclass(kind, BaseExceptionGroup):
        error = kind(args[0], [load_exception(member) for member in args[1]])
    else:
        try:
            error = kind(*args)
        except Exception:
            error = kind.__new__(kind)
        error.args = args
    vars(error).update(attributes)
    return error


def dumps_code(
    value: Any, *, what: str, by_name: frozenset[str] = frozenset(), also: frozenset[str] = frozenset()
) -> bytes:
    """Return the bytes of a value, and of the modules that its functions import or `also` names.

    Classes of these modules and of `by_name` are pickle_with_options by name. SerializationError names `what`.
    """
    names = set[str]()
    body, buffers = _pickle_value(value, what=what, modules=names, by_name=by_name)
    names |= also
    table, stamps = collect_user_modules(names, digest_of_code), get_linked_package_stamps(names)
    if table:
        body, buffers = _pickle_value(value, what=what, by_name=by_name.union(table))
    return _join_with_modules(body, buffers, table, stamps)


def dumps_arguments(value: Any, *, by_name: frozenset[str] = frozenset(), brought: set[str] | None = None) -> bytes:
    """Return the bytes of a call's arguments and of the modules that they import, except modules in `by_name`.

    Adds the names of included modules to `brought`. Raises SerializationError.
    """
    if (plain := pickle_if_small_builtin(value)) is not None:
        return plain
    names = set[str]()
    body, buffers = _pickle_value(value, what="argument", modules=names, by_name=by_name)
    names -= by_name
    table = collect_user_modules(names, digest_of_code) if names else {}
    if table:
        body, buffers = _pickle_value(value, what="argument", by_name=by_name.union(table))
        if brought is not None:
            brought.update(table)
    return _join_with_modules(body, buffers, table, {})


def _join_with_modules(body: bytes, buffers: list[memoryview], table: Table, stamps: Mapping[str, str]) -> bytes:
    if table or stamps:
        return b"".join(join_parts(WITH_MODULES, pickle.dumps((table, stamps), 5), [body, *buffers]))
    return b"".join(join_parts(WITH_BUFFERS, body, buffers)) if buffers else body


def names_of_sent_modules(data: bytes) -> frozenset[str]:
    """Return the names of the modules in the bytes of `dumps_code`."""
    return _names_of_sent_modules(data) if data[:1] == WITH_MODULES else frozenset()


@functools.lru_cache(maxsize=64)
def _names_of_sent_modules(data: bytes) -> frozenset[str]:
    return frozenset(versions_of_sent_modules(data))


def versions_of_sent_modules(data: Buffer | str) -> Mapping[str, str]:
    """Return the versions of sent modules by name, from bytes or a file; empty for damaged bytes."""
    try:
        if isinstance(data, str):
            with open(data, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                packed = extract_module_table(view)
        else:
            packed = extract_module_table(data)
        table: Table = pickle.loads(packed)[0] if packed else {}
        return {str(name): str(version) for name, (_, _, version, _) in table.items()}
    except BaseException:  # damaged bytes may unpickle to anything, for example SystemExit
        return {}


def loads_code(data: Buffer, *, under: SentModules = NO_MODULES) -> tuple[Any, SentModules]:
    """Return the value that `dumps_code` received, and its modules combined with the modules `under`, which import
    statements now find.

    Raises SerializationError, and exceptions of unpickling.
    """
    if data[:1] != WITH_MODULES:
        under.activate()
        return loads(data), under
    packed, body, *buffers = split_payload(data)
    modules = SentModules(*pickle.loads(packed))
    if under is not NO_MODULES:
        modules = modules.combined_with(under)
    modules.activate()
    return pickle.loads(body, buffers=buffers), modules
