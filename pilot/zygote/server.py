"""The zygote's loop (import, freeze, then fork on request), and the start of a library in a forked child.

The zygote kills the descendants of ended libraries. After the agent's end, it kills all its descendants, removes the
pilot's scratch folder and exits.

If modules have started threads, libraries start in new interpreters, because a fork never releases the locks of other
threads. Libraries with GPUs also start in new interpreters if a module queried PyTorch for GPUs, because the zygote
sees no GPU.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

from stoker.pilot.core import infrastructure
from stoker.pilot.zygote import client, processes

# ---- threads

HARMLESS_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads that do not prevent a fork. jemalloc's thread (in pyarrow) only frees memory."""
_THREAD_NAME_WAIT_S = 0.05  # seconds within which a new thread sets its name


class ImportedThreads:
    def __init__(self) -> None:
        self._started = dict.fromkeys(_thread_names(), "code before the imports")

    def attribute_new_threads(self, module: str) -> None:
        for thread in _thread_names():
            self._started.setdefault(thread, module)

    def find_harmful_threads(self) -> dict[str, str]:
        """Return, for each module, the names of its threads that make a fork unsafe."""
        names: dict[str, list[str]] = {}
        for wait_s in (_THREAD_NAME_WAIT_S, 0.0):
            names.clear()
            for thread, name in _thread_names().items():
                if thread != os.getpid() and name not in HARMLESS_THREADS:
                    names.setdefault(self._started.get(thread, "something later"), []).append(name)
            if not names:
                break
            time.sleep(wait_s)
        return {module: ", ".join(sorted(each)) for module, each in names.items()}


def _thread_names() -> dict[int, str]:
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:  # the thread may have ended
            found[int(thread)] = file.read().strip()
    return found


# ---- GPU queries during imports

_CUDA_MODULE = "torch.cuda"
_QUERY_FUNCTIONS = ("is_available", "device_count", "init")


class GpuQueryRecorder(MetaPathFinder):
    """Records whether a module queries PyTorch for GPUs between `start` and `stop`."""

    def __init__(self) -> None:
        self.has_queried = False
        self._original_functions: dict[str, Callable[..., Any]] = {}

    def start(self) -> None:
        if _CUDA_MODULE in sys.modules:
            self._wrap_query_functions(sys.modules[_CUDA_MODULE])
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, plain in self._original_functions.items():
            setattr(sys.modules.get(_CUDA_MODULE), name, plain)

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        if fullname != _CUDA_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._wrap_query_functions(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _wrap_query_functions(self, module: ModuleType) -> None:
        for name in _QUERY_FUNCTIONS:
            plain = getattr(module, name, None)
            if callable(plain):
                self._original_functions[name] = plain
                setattr(module, name, functools.partial(self._record_query, plain))

    def _record_query(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.has_queried = True
        return plain(*args, **kwargs)


# ---- the child


def become_library(order: client.Fork, sock: int, *, parent: int) -> NoReturn:
    code = infrastructure.SETUP_FAILED
    try:
        _prepare_child_process(order, parent)
        code = 1
        module, _, name = order.entry.partition(":")
        if order.fresh:
            os.set_inheritable(sock, True)
            command = [sys.executable, "-P", "-m", module.rpartition(".")[0], str(sock)]
            os.execv(command[0], command)
        set_thread_counts(order.threads)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):  # unlike numpy, Python's `random` reseeds after a fork
            numpy.random.seed()
        getattr(importlib.import_module(module), name)(sock)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Skip the exit handlers of the interpreter, because the zygote registered them before the fork.
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _prepare_child_process(order: client.Fork, parent_pid: int) -> None:
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    os.setsid()
    processes.adopt_orphans()
    for how in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(how, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.update(dict.fromkeys(client.THREAD_VARIABLES, str(order.threads)) | order.environment)
    os.chdir(order.folder)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # out of memory: the kernel kills a library before the agent


def set_thread_counts(count: int) -> None:
    os.environ.update(dict.fromkeys(client.THREAD_VARIABLES, str(count)))
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(count)


# ---- the loop

_decode = msgspec.msgpack.Decoder[client.ToZygote](client.ToZygote).decode
_encode = msgspec.msgpack.Encoder().encode


class ZygoteServer:
    def __init__(self, sock: socket.socket, *, scratch: str) -> None:
        self._sock = sock
        self._scratch = scratch
        self._libraries: dict[int, int] = {}  # library number by process id
        self._own_trackers: frozenset[int] = frozenset()
        """Process ids of preloaded modules' resource trackers."""
        self._trackers: dict[int, float] = {}
        """Monotonic time at which to kill each resource tracker of an ended library, by process id."""
        self._began = time.time()
        self._has_threads = False
        self._asked_for_gpus = False
        self._must_exit = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        self._sock.setblocking(False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "_must_exit", True))
        signal.signal(signal.SIGTERM, lambda *_: None)  # ignore it: the agent, not the batch system, ends this process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while not self._must_exit:
            poller.poll(1000.0 if self._trackers else None)
            with suppress(BlockingIOError):
                while os.read(self._wake_read, 512):
                    pass
            self._reap_children()
            self._kill_late_trackers()
            self._handle_orders()
        self._clean_up()

    def _handle_orders(self) -> None:
        while not self._must_exit:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, client.MAX_PACKET_BYTES, 4)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._must_exit = True
                return
            match order := _decode(data):
                case client.Fork():
                    self._fork_library(order, fds[0])
                case client.Preload(modules=modules):
                    self._preload_modules(modules)
                case client.Kill(library=library):
                    processes.kill_all(pid for pid, here in self._libraries.items() if here == library)

    def _send(self, message: client.FromZygote) -> None:
        self._sock.setblocking(True)  # the agent reads all messages, so this send blocks only for a short time
        try:
            self._sock.send(_encode(message))
        except OSError:
            self._must_exit = True
        finally:
            self._sock.setblocking(False)

    def _preload_modules(self, modules: tuple[str, ...]) -> None:
        started = time.monotonic()
        failed: dict[str, str] = {}
        threads = ImportedThreads()
        listener = GpuQueryRecorder()
        listener.start()
        gc.disable()  # garbage collection would take a fifth of PyTorch's import time and free little memory
        for name in modules:
            module, _, attribute = name.partition(":")
            try:
                found = importlib.import_module(module)
                if attribute:
                    getattr(found, attribute)
            except BaseException as error:  # a module may call sys.exit
                failed[name] = f"{type(error).__name__}: {error}"
            threads.attribute_new_threads(name)
        listener.stop()
        set_thread_counts(1)
        gc.freeze()  # do not collect first: it takes a tenth of PyTorch's import time and frees no memory
        gc.enable()
        self._own_trackers = frozenset(processes.child_resource_trackers())
        harmful = threads.find_harmful_threads()
        self._has_threads, self._asked_for_gpus = bool(harmful), listener.has_queried
        # From now on this process must clean up its children. When the agent ends, request SIGUSR1 instead of SIGKILL.
        processes.adopt_orphans()
        processes.die_with_parent(signal.SIGUSR1)
        self._send(client.Preloaded(failed, time.monotonic() - started, harmful, self._asked_for_gpus))

    def _fork_library(self, order: client.Fork, sock: int) -> None:
        has_gpus = bool(order.environment.get("CUDA_VISIBLE_DEVICES"))
        if self._has_threads or (self._asked_for_gpus and has_gpus):
            order = msgspec.structs.replace(order, fresh=True)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(client.ForkFailed(library=order.library, reason=str(error)))
        else:
            if pid == 0:
                self._sock.close()
                signal.set_wakeup_fd(-1)
                os.close(self._wake_read)
                os.close(self._wake_write)
                become_library(order, sock, parent=parent)
            self._libraries[pid] = order.library
            self._send(client.Forked(library=order.library, pid=pid))
        os.close(sock)

    def _reap_children(self) -> None:
        while (ended := processes.reap_child(-1)) is not None:
            pid, status = ended
            self._trackers.pop(pid, None)
            library = self._libraries.pop(pid, None)
            if library is None:
                continue
            # A library's resource trackers do not count as orphans.
            orphans = processes.kill_stray_children(self._libraries) - self._trackers.keys()
            processes.remove_system_v_segments({pid, *orphans}, since=self._began)
            until = time.monotonic() + processes.TRACKER_LIMIT_S
            for tracker in set(processes.child_resource_trackers()) - self._own_trackers:
                self._trackers.setdefault(tracker, until)
            code = os.waitstatus_to_exitcode(status)
            self._send(client.Exited(library, max(0, -code), max(0, code), len(orphans)))

    def _kill_late_trackers(self) -> None:
        if self._trackers:
            here = set(processes.child_resource_trackers())  # another process may have the pid of a reaped tracker
            self._trackers = {pid: until for pid, until in self._trackers.items() if pid in here}
            processes.kill_all(pid for pid, until in self._trackers.items() if time.monotonic() > until)

    def _clean_up(self) -> None:
        libraries = set(self._libraries)
        killed = processes.kill_stray_children(())
        processes.remove_system_v_segments(libraries | killed, since=self._began)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        processes.end_resource_trackers(self._own_trackers)
