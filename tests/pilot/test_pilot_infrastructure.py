"""Classify exceptions that disk, device or network cause. Tests raise real exceptions if possible, else exceptions with
the exact texts from C code.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_manager import FakeManager, recipe

from stoker.pilot.library.failures import LibraryResources, find_infrastructure_cause
from stoker.protocol.calls import Failure, FailureKind

HERE = LibraryResources("/tmp")
GIB = 1 << 30


def by_c(kind: type[BaseException], text: str) -> None:
    """Raise an exception from compiled code, as PyTorch does."""
    set_error = ctypes.pythonapi.PyErr_SetObject
    set_error.argtypes, set_error.restype = (ctypes.py_object, ctypes.py_object), None
    set_error(kind, text)


def caught(act: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as info:
        act()
    return info.value


def find(act: Callable[[], Any], place: LibraryResources = HERE) -> str:
    """Return the infrastructure cause of a raised exception; "" for a user error."""
    found = find_infrastructure_cause(caught(act), place)
    return found.symptom.means if found is not None else ""


def read_nothing_mapped() -> bytes:
    """Make the kernel return EIO by access to the unmapped address 0."""
    with open("/proc/self/mem", "rb") as file:
        return file.read(1)


# ---- errors of the kernel


def chained(how: str) -> Callable[[], None]:
    """Return a function that gets EIO from the kernel and then raises EIO again or another error."""

    def act() -> None:
        try:
            read_nothing_mapped()
        except OSError as error:
            if how == "again":
                raise error
            if how == "cause":
                raise LookupError("no such weights") from error
            if how == "suppressed":
                raise LookupError("no such weights") from None
            if how == "imitated":
                raise OSError(error.errno, error.strerror)  # noqa: B904
            raise LookupError("the fallback has no weights either")  # noqa: B904

    return act


def in_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(read_nothing_mapped).result()


def in_a_task() -> None:
    async def tasks() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(read_nothing_mapped))

    asyncio.run(tasks())


def missing() -> None:
    open("/nowhere/at/all")  # noqa: SIM115


def own_eio() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("act", [read_nothing_mapped, chained("again"), chained("cause"), in_a_thread, in_a_task])
def test_error_of_the_kernel_is_infrastructure(act: Callable[[], Any]) -> None:
    assert find(act) == "a disk or file server failed (EIO)"


@pytest.mark.parametrize(
    "act", [own_eio, missing, lambda: 1 / 0, chained("suppressed"), chained("imitated"), chained("handled")]
)
def test_error_of_the_program_is_no_infrastructure(act: Callable[[], Any]) -> None:
    """The cause of `raise ... from` counts. An exception that was only being handled does not count."""
    assert find(act) == ""


def test_exception_group_with_a_program_error_is_a_user_error() -> None:
    both = ExceptionGroup("both", [caught(read_nothing_mapped), caught(lambda: 1 / 0)])
    assert find_infrastructure_cause(both, HERE) is None


def test_exception_that_cannot_be_inspected_is_a_user_error() -> None:
    class Odd(Exception):
        errno = "5"

        def __str__(self) -> str:
            raise RuntimeError("no text")

    def raises() -> None:
        raise Odd

    assert find(raises) == ""
    assert find_infrastructure_cause(OSError(errno.EIO, "never raised"), HERE) is None
    loop, own = caught(read_nothing_mapped), caught(raises)
    loop.__cause__, own.__cause__ = loop, own
    assert find_infrastructure_cause(loop, HERE) is not None
    assert find_infrastructure_cause(own, HERE) is None


# ---- full disks


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB for ten files; skip if this user cannot mount disks."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=10", "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("this user may mount nothing")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_is_infrastructure_only_if_local_and_still_full(tiny: Path, tmp_path: Path) -> None:
    own = tiny / "lib-1"
    own.mkdir()

    def fill() -> None:
        with open(own / "file", "wb") as file:
            file.write(bytes(2_000_000))

    def make_files() -> None:
        for number in range(20):
            (tiny / str(number)).touch()

    here, elsewhere = LibraryResources(str(own)), LibraryResources(str(tmp_path / "lib-1"))
    assert find(fill, here) == "", "its own file fills the disk, and would fill any"
    (own / "file").unlink()
    (tiny / "others").write_bytes(bytes(960_000))
    assert find(fill, here) == "a disk of the node is full (ENOSPC)"
    assert find(fill, elsewhere) == "", "its file is on no disk of the node"
    full = caught(fill)
    (own / "file").unlink()
    assert find_infrastructure_cause(full, here) is not None, (
        "its file is removed, and other files still fill most of the disk"
    )
    (tiny / "others").unlink()
    assert find_infrastructure_cause(full, here) is None, "space is free: the user requested more than a disk has"
    full = caught(make_files)
    assert str(tiny) in str(full)
    assert find_infrastructure_cause(full, here) is not None, "no file can be made on it"
    assert find_infrastructure_cause(full, elsewhere) is None, (
        "the file is on no disk of this node: it is full everywhere"
    )


def _numpy(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(path, numpy.zeros(40_000))


def _torch(path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.zeros(80_000), path)


def _safetensors(path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors.torch").save_file({"w": torch.zeros(80_000)}, str(path))


def _copied(path: Path) -> None:
    source = path.parent.parent / "source"
    source.write_bytes(bytes(320_000))
    shutil.copyfile(source, path)


@pytest.mark.parametrize("write", [_numpy, _torch, _safetensors, _copied])
def test_full_disk_errors_of_python_packages_are_infrastructure(
    write: Callable[[Path], None], tiny: Path, tmp_path: Path
) -> None:
    """Python libraries report a full disk in different ways: a short write, a wrong position, an error after the file
    was removed.
    """
    (tiny / "others").write_bytes(bytes(960_000))
    (tiny / "lib-1").mkdir()
    assert find(lambda: write(tiny / "file"), LibraryResources(str(tiny / "lib-1"))).startswith(
        "a disk of the node is full"
    )
    assert find(lambda: write(tiny / "file"), LibraryResources(str(tmp_path / "lib-1"))) == "", (
        "a disk that is not the node's"
    )


def test_full_temporary_folder_is_attributed_to_the_node(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its disk is full at the first call, `tempfile.gettempdir` selects another folder."""
    monkeypatch.setenv("TMPDIR", str(tiny))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tiny / "others").write_bytes(bytes((1 << 20) - 4096))

    def write() -> None:
        with open(tiny / "file", "wb") as file:
            file.write(bytes(100_000))

    assert find(write, LibraryResources("/proc/no library")) == "a disk of the node is full (ENOSPC)"


def raise_full() -> None:
    """Raise a full disk from C, as compiled code does."""
    by_c(OSError, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))  # type: ignore[arg-type]


def _into_a_device_that_is_always_full(_folder: Path) -> None:
    with open("/dev/full", "w") as file:
        print("a line", file=file, flush=True)


@pytest.mark.parametrize("write", [_into_a_device_that_is_always_full, lambda _folder: raise_full()])
def test_full_disk_error_is_a_user_error_if_no_disk_is_full(write: Callable[[Path], None], tiny: Path) -> None:
    (tiny / "others").write_bytes(bytes(600_000))
    assert find(lambda: write(tiny), LibraryResources(str(tiny / "lib-1"))) == ""


def test_file_size_limit_is_the_users_fault_on_a_half_full_disk(tiny: Path) -> None:
    """NumPy reports any incomplete write by a count of items, so only a nearly full disk proves that the disk was the
    cause.
    """
    numpy = pytest.importorskip("numpy")
    (tiny / "others").write_bytes(bytes(600_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        assert find(lambda: numpy.save(tiny / "file", numpy.zeros(20_000)), LibraryResources(str(tiny))) == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_existing_file_that_cannot_be_opened_is_infrastructure(tmp_path: Path) -> None:
    """safetensors reports every error of open(2) as a missing file."""
    there = tmp_path / "there.safetensors"
    text = "No such file or directory: {}"
    assert find(lambda: by_c(FileNotFoundError, text.format(there))) == ""
    there.touch()
    assert find(lambda: by_c(FileNotFoundError, text.format(there))) == "an existing file could not be opened"
    assert find(lambda: by_c(FileNotFoundError, text.format("\0"))) == ""
    assert find(lambda: open(tmp_path / "gone")) == ""  # noqa: SIM115


# ---- devices: the exact texts

ECC = """CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
"""pytorch/c10/cuda/CUDAException.cpp; huggingface/accelerate#1192, vllm-project/vllm#5222."""
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {said}, NCCL version 2.21.5\n{name}: {more}"
)
"""NVIDIA/nccl#2076, #1928, #1241."""
REMOTE = NCCL.format(
    said="remote process exited or there was a network error",
    name="ncclRemoteError",
    more="A call failed possibly due to a network error or a remote process exiting prematurely.",
)
INVALID = NCCL.format(
    said="invalid usage", name="ncclInvalidUsage", more="This usually reflects invalid usage of NCCL library."
)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26518"
"""Messages of two ranks of PyTorch 2.13 when one rank ends."""


@pytest.mark.parametrize(
    ("text", "means"),
    [
        (ECC, "the device met a memory error that it cannot correct"),
        ("CUDA error: uncorrectable NVLink error detected during the execution", "a link between devices failed"),
        ("Unable to determine the device handle: GPU is lost", "the device is lost"),
        (
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
            "the node's fabric of devices is not up",
        ),
        (REMOTE, "NCCL lost a connection"),
        (GLOO, "Gloo lost a connection"),
        (GLOO.replace("Connection closed by peer", "Read error: Connection reset by peer"), "Gloo lost a connection"),
        ("I/O error: Input/output error (os error 5)", "a disk or file server failed (EIO, ESTALE)"),
        ("read(): fd 9 failed with Stale file handle", "a disk or file server failed (EIO, ESTALE)"),
        # a mistake in a program's own code
        ("CUDA error: device-side assert triggered", ""),
        ("CUDA error: an illegal memory access was encountered", ""),
        ("CUDA error: invalid device ordinal", ""),
        ("CUDA error: unspecified launch failure", ""),
        (INVALID, ""),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)", ""),
        ("Expected all tensors to be on the same device", ""),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", ""),
    ],
)
def test_error_texts_of_compiled_code_are_classified(text: str, means: str) -> None:
    def raised() -> None:
        raise RuntimeError(text)

    assert find(lambda: by_c(RuntimeError, text)) == means
    assert find(raised) == "", "the user's own"
    assert find(lambda: by_c(ValueError, text)) in ("", "a disk or file server failed (EIO, ESTALE)")


def test_exception_types_of_pytorch_are_classified() -> None:
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed")
    assert find(lambda: by_c(torch.AcceleratorError, ECC)) == "the device met a memory error that it cannot correct"
    assert find(lambda: by_c(distributed.DistBackendError, REMOTE)) == "NCCL lost a connection"
    assert find(lambda: by_c(torch.AcceleratorError, "CUDA error: device-side assert triggered")) == ""
    assert find(lambda: torch.empty(10**15)) == "", "more host memory than any node has"
    assert find(lambda: torch.load("/proc/self/mem")) == "a disk or file server failed (EIO)"


@pytest.mark.parametrize(
    ("probe", "counts"),
    [
        ("import sys; sys.exit(0)", False),
        ("import sys; print('no driver'); sys.exit(3)", False),
        ("import sys; print('cuda:0 failed: out of memory'); sys.exit(4)", False),
        ("import sys; print(sys.argv[-1], 'fell off the bus'); sys.exit(4)", True),
        ("import sys; sys.exit(5)", True),
        ("import os; os.abort()", True),
    ],
)
def test_launch_failure_is_infrastructure_only_if_its_probe_fails(probe: str, counts: bool) -> None:
    place = LibraryResources("/tmp", ("cuda:0",), probe=(sys.executable, "-c", probe))
    assert bool(find(lambda: by_c(RuntimeError, "CUDA error: unspecified launch failure"), place)) is counts
    assert find(lambda: by_c(RuntimeError, "CUDA error: device-side assert triggered"), place) == ""


OOM = (
    "CUDA out of memory. Tried to allocate {asked} GiB. GPU {gpu} has a total capacity of 79.15 GiB of which {free} "
    "GiB is free. Process 4711 has 60.00 GiB memory in use. Of the allocated memory 8.00 GiB is allocated by PyTorch."
)
"""pytorch/c10/cuda/CUDACachingAllocator.cpp."""


@pytest.mark.parametrize(
    ("budget", "held", "free", "asked", "counts"),
    [
        (20, 8, 1, 4, True),  # 20 GB are reserved, and other processes use the missing part
        (10, 8, 1, 4, False),  # the library requests more than its context declares
        (0, 8, 1, 4, False),  # the context declares nothing, so no memory is reserved
        (20, 8, 30, 4, False),  # memory is free, so the limit of the process refused the request
        (20, 19, 1, 4, False),
    ],
)
def test_device_memory_error_is_infrastructure_only_within_budget(
    monkeypatch: pytest.MonkeyPatch, budget: int, held: int, free: int, asked: int, counts: bool
) -> None:
    class OutOfMemoryError(RuntimeError):
        __module__, __qualname__ = "torch", "OutOfMemoryError"

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_reserved=lambda index: held * GIB if index == 1 else 0,
        mem_get_info=lambda index: (free * GIB if index == 1 else 0, 80 * GIB),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    text = OOM.format(asked=f"{asked:.2f}", free=f"{free:.2f}", gpu=1)
    place = LibraryResources("/tmp", ("cuda:0", "cuda:1"), budget_bytes=budget * GIB)
    assert bool(find(lambda: by_c(OutOfMemoryError, text), place)) is counts


# ---- in a library


def _own() -> None:
    raise RuntimeError(ECC)


def _ecc_after(told: Path) -> None:
    while not told.exists():
        time.sleep(0.01)
    by_c(RuntimeError, ECC)


def test_library_with_a_failed_device_ends_and_reports_the_device(alone: FakeManager, tmp_path: Path) -> None:
    told = tmp_path / "all calls are sent"
    alone.ready(recipe())
    own, call, after = (
        alone.run(act, [given])[0] for act, given in ((_own, ()), (_ecc_after, (told,)), (os.getpid, ()))
    )
    alone.settle()
    told.touch()
    left = alone.gone()
    error, failure = alone.results([own, call])
    assert isinstance(error, RuntimeError)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.device) == (FailureKind.INFRASTRUCTURE, "cpu:0")
    assert "RuntimeError: CUDA error: uncorrectable ECC error encountered" in failure.message
    assert (left.failure.kind, left.running, left.loading) == (FailureKind.PILOT, (), False)
    assert "its device failed" in left.failure.message
    assert left.unstarted == (after,)


def test_library_ends_after_three_disk_failures_in_a_row(served: FakeManager) -> None:
    served.ready(recipe())
    calls = [served.run(act, [()])[0] for act in (*[read_nothing_mapped, os.getpid] * 3, *[read_nothing_mapped] * 3)]
    left = served.gone()
    failures = served.results(calls)
    assert [isinstance(each, Failure) for each in failures] == [True, False] * 3 + [True] * 3
    assert (left.failure.kind, left.running, left.unstarted) == (FailureKind.PILOT, (), ())
    assert "its calls keep failing" in left.failure.message
