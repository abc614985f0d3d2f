"""What CUDA, NVML and NCCL say, in their own words, and the class of torch's that carries it (`op.cpp`)."""

from __future__ import annotations

_MORE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
    " incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable"
    " device-side assertions.\n"
)
_NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {}, NCCL version 2.21.5\n{}"

MEMORY_ERRORS = {
    "ECC": ("accelerator", "CUDA error: uncorrectable ECC error encountered" + _MORE),
    "NVLink": ("accelerator", "CUDA error: uncorrectable NVLink error detected during the execution" + _MORE),
    "ECC, cuBLAS": (
        "error",
        "CUDA error: uncorrectable ECC error encountered when calling `cublasSgemm( handle, opa)`",
    ),
    "ECC, async": ("accelerator", "CUDA error: uncorrectable ECC error encountered\nException raised from c10" + _MORE),
}
LOST = {
    "lost": ("error", "Unable to determine the device handle for GPU0000:65:00.0: GPU is lost.  Reboot the system"),
    "off the bus": ("accelerator", "CUDA error: unknown error; NVRM: GPU at PCI:0000:65:00: has fallen off the bus."),
    "fabric": ("error", "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized (CUDA)"),
}
SICK = {
    "launch failure": ("accelerator", "CUDA error: unspecified launch failure" + _MORE),
    "unknown error": ("accelerator", "CUDA error: unknown error" + _MORE),
    "no device": ("accelerator", "CUDA error: no CUDA-capable device is detected" + _MORE),
    "busy": ("accelerator", "CUDA error: CUDA-capable device(s) is/are busy or unavailable" + _MORE),
}
"""What a mistake in a kernel causes as well: the probe of the device decides."""
CONNECTIONS = {
    "remote": (
        "distributed",
        _NCCL.format(
            "remote process exited or there was a network error",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        ),
    ),
    "system": (
        "distributed",
        _NCCL.format(
            "unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        ),
    ),
}
OUT_OF_MEMORY = (
    "memory",
    "CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of {total:.2f} GiB of which"
    " {free:.2f} GiB is free. Process 4711 has {others:.2f} GiB memory in use. Including non-PyTorch memory, this"
    " process has {held:.2f} GiB memory in use.",
)
OF_THE_PROGRAM = {
    "assertion": ("accelerator", "CUDA error: device-side assert triggered" + _MORE),
    "address": ("accelerator", "CUDA error: an illegal memory access was encountered" + _MORE),
    "launch failure": ("accelerator", "CUDA error: unspecified launch failure" + _MORE),
    "ordinal": ("accelerator", "CUDA error: invalid device ordinal" + _MORE),
}
"""What code causes: the device is sound. A launch failure among them."""
MISUSED = {
    "usage": ("distributed", _NCCL.format("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage.")),
    "argument": (
        "distributed",
        _NCCL.format("invalid argument", "ncclInvalidArgument: Invalid value for an argument."),
    ),
}
