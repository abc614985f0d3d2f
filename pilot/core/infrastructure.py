"""Tables of failures that devices, disks or networks cause: exceptions, disk errors, and exit codes of libraries.

An exception without a matching row is the user's fault. A bug and a faulty device may cause the same error text. Such
an error counts as a device fault only if a probe of the device fails.
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Collection, Iterator

import msgspec


# ---- infrastructure
class Proof(enum.Enum):
    """The condition under which an exception is a fault of the infrastructure."""

    NONE = "none"  # no proof is needed: the text of the exception is enough
    DISK_IS_FULL = "disk is full"  # the file is on a local disk that other programs have filled
    FILE_IS_THERE = "file is there"  # a new attempt opens the named file, or fails with an error of the file server
    WITHIN_BUDGET = "within budget"  # with the failed allocation, the library would still use less memory than declared
    DEVICE_FAILS = "device fails"  # a probe of the device fails


class Symptom(msgspec.Struct, frozen=True):
    """A kind of exception. `types`: names of the types, to avoid imports; `number`: the exception's errno (0 = any);
    `text`: a pattern in the exception's text; `probed`: True if the pilot must probe the device and end the library.
    """

    types: tuple[str, ...]
    means: str
    source: str
    number: int = 0
    text: str = ""
    proof: Proof = Proof.NONE
    probed: bool = False
    names_file: bool = False  # True if only exceptions with a file name match


_OS = ("builtins.OSError",)
_ANY_ERROR = ("builtins.Exception",)  # any exception type, because Rust and C++ libraries define their own types
_RUNTIME = ("builtins.RuntimeError", "pynvml.NVMLError")  # the exception types of PyTorch
_DEVICE_MEMORY = ("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "torch.AcceleratorError")
_CUDA = "NVIDIA's CUDA runtime API, cudaError_t; PyTorch writes `CUDA error: ` before it"
_LINUX = "errno(3), strerror"
_RUST = "std::io::Error's Display: safetensors, tokenizers"
_TORCH_FILES = "PyTorch, torch/csrc/serialization.cpp"
_HDF5 = "HDF5, H5FDsec2.c, `errno = %d, error message = `: h5py"

SYMPTOMS: tuple[Symptom, ...] = (
    # ---- devices, with unambiguous errors
    Symptom(_RUNTIME, "the device met a memory error that it cannot correct", _CUDA + ", 214",
            text=r"uncorrectable ECC error|ECC_UNCORRECTABLE", probed=True),
    Symptom(_RUNTIME, "a link between devices failed", _CUDA + ", 220", text=r"uncorrectable NVLink error",
            probed=True),
    Symptom(_RUNTIME, "the device is lost", "NVML, nvmlErrorString(NVML_ERROR_GPU_IS_LOST); Xid 79",
            text=r"GPU is lost|fallen off the bus", probed=True),
    Symptom(_RUNTIME, "the node's fabric of devices is not up", _CUDA + ", 802",
            text=r"CUDA.*system not yet initialized", probed=True),
    # ---- devices, with errors that a bug in a kernel may also cause
    Symptom(_RUNTIME, "the device failed while a kernel ran", _CUDA + ", 719 (Xid 13, 48, 79)",
            text=r"(CUDA|HIP) error: unspecified launch failure", proof=Proof.DEVICE_FAILS, probed=True),
    Symptom(_RUNTIME, "the device failed in hardware", _CUDA + ", 714, 715, 721",
            text=r"CUDA error: (hardware stack error|an illegal instruction was encountered|Invalid access of peer GPU"
                 r" memory over nvlink or a hardware error)", proof=Proof.DEVICE_FAILS, probed=True),
    Symptom(_RUNTIME, "the device cannot be reached", _CUDA + ", 46, 100, 999",
            text=r"CUDA(-capable device\(s\) is/are busy or unavailable| error: unknown error"
                 r"| error: no CUDA-capable device is detected)|CUDA unknown error", proof=Proof.DEVICE_FAILS,
                 probed=True),
    # ---- device memory
    Symptom(_DEVICE_MEMORY, "another process holds the device's memory", "PyTorch, c10/cuda/CUDACachingAllocator.cpp;"
            " CUDA, 2", text=r"out of memory", proof=Proof.WITHIN_BUDGET),
    # ---- connections of ranks
    Symptom(_RUNTIME, "NCCL lost a connection",
            "NCCL, ncclGetErrorString(ncclRemoteError), in PyTorch's DistBackendError",
            text=r"NCCL error.*(ncclRemoteError|remote process exited or there was a network error)"),
    Symptom(_RUNTIME, "NCCL was refused by the system", "NCCL, ncclGetErrorString(ncclSystemError)",
            text=r"NCCL error.*(ncclSystemError|unhandled system error)"),
    Symptom(_RUNTIME, "Gloo lost a connection", "Gloo, gloo/transport/tcp/pair.cc",
            text=r"gloo/transport/.*(Connection closed by peer|Connection reset by peer|Broken pipe|No route to host"
                 r"|Network is (unreachable|down))"),
    # ---- files
    Symptom(_OS, "a disk or file server failed (EIO)", _LINUX, number=errno.EIO),
    Symptom(_OS, "a file server lost a file that was open (ESTALE)", _LINUX, number=errno.ESTALE),
    Symptom(_OS, "a file server failed (EREMOTEIO)", _LINUX, number=errno.EREMOTEIO),
    Symptom(_OS, "a file system is damaged (EUCLEAN)", _LINUX, number=errno.EUCLEAN),
    Symptom(_OS, "a file server has dropped this node (ESHUTDOWN)", _LINUX + "; Lustre, evicted clients",
            number=errno.ESHUTDOWN, names_file=True),
    Symptom(_OS, "a file system's server has ended (ENOTCONN)", _LINUX + "; FUSE", number=errno.ENOTCONN,
            names_file=True),
    Symptom(_OS, "a disk of the node is full (ENOSPC)", _LINUX, number=errno.ENOSPC, proof=Proof.DISK_IS_FULL),
    Symptom(_ANY_ERROR, "a disk or file server failed (EIO, ESTALE)", _RUST, text=r"\(os error (5|116)\)"),
    Symptom(_ANY_ERROR, "a disk of the node is full (ENOSPC)", _RUST, text=r"\(os error 28\)",
            proof=Proof.DISK_IS_FULL),
    Symptom(_OS, "a disk or file server failed (EIO, ESTALE)", _HDF5, text=r"\berrno = (5|116), error message"),
    Symptom(_OS, "a disk of the node is full (ENOSPC)", _HDF5, text=r"\berrno = 28, error message",
            proof=Proof.DISK_IS_FULL),
    Symptom(_RUNTIME, "a disk of the node is full", "PyTorch, caffe2/serialize/inline_container.cc; libstdc++",
            text=r"PytorchStreamWriter failed writing file|inline_container\.cc.*unexpected pos \d+ vs \d+"
                 r"|basic_ios::clear: iostream error", proof=Proof.DISK_IS_FULL),
    Symptom(_RUNTIME, "a disk of the node is full (ENOSPC)", _TORCH_FILES,
            text=r"write\(\): fd \d+ failed with No space",
            proof=Proof.DISK_IS_FULL),
    Symptom(_RUNTIME, "a disk or file server failed (EIO, ESTALE)", _TORCH_FILES,
            text=r"(read|write)\(\): fd \d+ failed with (Input/output error|Stale file handle)"),
    Symptom(_OS, "a disk of the node is full", "NumPy, _core/src/multiarray/convert.c, tofile",
            text=r"^\d+ requested and \d+ written$", proof=Proof.DISK_IS_FULL),
    Symptom(("builtins.FileNotFoundError",), "an existing file could not be opened", "safetensors, which says so of"
            " every error of open(2)", text=r"^No such file or directory: ", proof=Proof.FILE_IS_THERE),
)  # fmt: skip

_TEXTS = {row.text: re.compile(row.text, re.IGNORECASE | re.DOTALL) for row in SYMPTOMS if row.text}


def matching_symptoms(types: Collection[str], *, number: int, text: str, names_file: bool) -> Iterator[Symptom]:
    for row in SYMPTOMS:
        if (
            any(each in types for each in row.types)
            and row.number in (0, number)
            and (names_file or not row.names_file)
            and (not row.text or _TEXTS[row.text].search(text))
        ):
            yield row


# ---- disks
_UNWRITABLE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def is_unwritable_disk_error(error: BaseException | None) -> bool:
    """Return True if the error means a full disk, an exceeded quota, or a read-only file system."""
    return isinstance(error, OSError) and error.errno in _UNWRITABLE_ERRNOS


# ---- exit codes
SOCKET_LOST = 117  # code in the library closed the library's socket
SCRATCH_FOLDER_GONE = 116  # the pilot lost its scratch folder, which is not the call's fault
NO_DESCRIPTORS = 115  # the calls left too many files open
OTHER_MODULES = 113  # a library without a context received a function that needs other versions of loaded modules
INTERPRETER_DAMAGED = 114  # a call damaged the interpreter or its limits permanently
SETUP_FAILED = 118  # the library could not open its log or its folder
DEVICE_FAILED = 119  # a device failed during a call, so the process of the library can no longer use devices
NODE_FAILED = 120  # several calls in a row failed because of a fault of the node
CLEANUP_FAILED = 121  # the library could not remove data of a call

PILOT_FAULT_CODES = frozenset({SCRATCH_FOLDER_GONE, SETUP_FAILED, DEVICE_FAILED, NODE_FAILED})  # not of contexts
NODE_FAULT_CODES = frozenset({DEVICE_FAILED, NODE_FAILED})  # faults that the calls did not cause

EXIT_CODE_TEXTS = {
    SOCKET_LOST: "lost its connection to the pilot: user code closes files that it did not open",
    SCRATCH_FOLDER_GONE: "found that its pilot's scratch folder is gone",
    NO_DESCRIPTORS: "had almost no free file descriptors: its calls leave files open",
    OTHER_MODULES: "received a function that needs other versions of loaded modules",
    INTERPRETER_DAMAGED: "can run no more calls: a call emptied sys.modules, or lowered a limit permanently",
    SETUP_FAILED: "could not open its log {log} or its folder; is that disk full?",
    DEVICE_FAILED: "ended because its device failed",
    CLEANUP_FAILED: "could not remove the files of a call; its log says why",
    NODE_FAILED: "ended: its calls keep failing because of a fault of the node",
}
