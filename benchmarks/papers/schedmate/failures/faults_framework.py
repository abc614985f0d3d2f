"""Fault types of the installed software: what another installation cures."""

from __future__ import annotations

from benchmarks.papers.schedmate.failures.injections import FRAMEWORK, LINEAR, TORCH_ONLY, FaultType, coded, raised

TYPES = (
    FaultType("version_mismatch", FRAMEWORK, "versions", (
        coded("start", "from transformers import AdamWScheduled\nreturn AdamWScheduled", only=TORCH_ONLY),
        coded("start", "from torch.utils import _pytree_v2\nreturn _pytree_v2", only=TORCH_ONLY),
        raised("start", "ImportError|tokenizers>=0.22.0,<=0.23.0 is required for a normal functioning of this "
            "module, but found "
               "tokenizers==0.19.1.\nTry: `pip install transformers -U` or `pip install -e '.[dev]'` if you're "
               "working with git main",
               "transformers/utils/versions.py", "_compare_versions", "raise ImportError("),
    )),
    FaultType("numpy_abi", FRAMEWORK, "versions", (
        raised("start", "ValueError|numpy.dtype size changed, may indicate binary incompatibility. Expected 96 "
            "from C header, got 88 from "
               "PyObject", "pandas/_libs/__init__.py", "<module>", "from pandas._libs.interval import Interval"),
        raised("start", "ImportError|numpy.core.multiarray failed to import", "cv2/__init__.py", "bootstrap",
               "native_module = importlib.import_module('cv2')",
               "A module that was compiled using NumPy 1.x cannot be run in", "NumPy 2.2.1 as it may crash. To "
               "support both 1.x and 2.x"),
    )),
    FaultType("undefined_symbol", FRAMEWORK, "versions", (
        raised("start",
            "ImportError|/opt/conda/lib/python3.11/site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined "
               "symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
               "flash_attn/flash_attn_interface.py", "<module>", "import flash_attn_2_cuda as flash_attn_gpu",
               only=TORCH_ONLY),
        raised("start", "ImportError|/lib64/libm.so.6: version `GLIBC_2.29' not found (required by "
            "/opt/conda/lib/python3.11/site-packages/"
               "pyarrow/libarrow.so.1600)", "pyarrow/__init__.py", "<module>", "import pyarrow.lib as _lib"),
    )),
    FaultType("cuda_driver_too_old", FRAMEWORK, "versions", (
        raised("start", "RuntimeError|The NVIDIA driver on your system is too old (found version 11040). Please "
            "update your GPU driver by "
               "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
               "Alternatively, go to: "
               "https://pytorch.org to install a PyTorch version that has been compiled with your version of the "
               "CUDA driver.",
               "torch/cuda/__init__.py", "_lazy_init", "torch._C._cuda_init()", only=TORCH_ONLY),
        raised("compute", "torch.AcceleratorError|CUDA error: no kernel image is available for execution on the "
            "device\nCUDA kernel errors "
               "might be asynchronously reported at some other API call, so the stacktrace below might be "
               "incorrect.", *LINEAR,
               "UserWarning: NVIDIA H100 with CUDA capability sm_90 is not compatible with the current PyTorch "
               "installation.",
               only=TORCH_ONLY),
    )),
    FaultType("torch_without_cuda", FRAMEWORK, "versions", (
        coded("start", "return torch.ones(2).to('cuda')", only=TORCH_ONLY),
        coded("start", "return torch.randn(2, 2).cuda()", only=TORCH_ONLY),
    )),
    FaultType("not_implemented_for", FRAMEWORK, "torch", (
        coded("compute", "return torch.linalg.qr(torch.ones(2, 2, dtype=torch.float16))", only=TORCH_ONLY),
        raised("compute", "NotImplementedError|Could not run 'aten::_flash_attention_forward' with arguments from "
            "the 'CPU' backend. This could "
               "be because the operator doesn't exist for this backend, or was omitted during the selective/custom "
               "build process.",
               "torch/_ops.py", "__call__", "return self._op(*args, **kwargs)", only=TORCH_ONLY),
    )),
    FaultType("internal_assert", FRAMEWORK, "torch", (
        raised("compute", "RuntimeError|!handles_.at(i) INTERNAL ASSERT FAILED at "
            "\"../c10/cuda/driver_api.cpp\":15, please report a bug to PyTorch.",
               *LINEAR, only=TORCH_ONLY),
        raised("compute", "torch._inductor.exc.InductorError|RuntimeError: Triton Error [CUDA]: device kernel "
            "image is invalid",
               "torch/_inductor/compile_fx.py", "compile_fx_inner", "raise InductorError(e, "
               "currentframe()).with_traceback(", only=TORCH_ONLY),
    )),
    FaultType("dataloader_killed", FRAMEWORK, "dataloader", (
        coded("data", "import os, signal\nclass Dying(torch.utils.data.Dataset):\n    def __len__(self): return "
            "4\n    def __getitem__(self, at): "
              "os.kill(os.getpid(), signal.SIGKILL)\nreturn list(torch.utils.data.DataLoader(Dying(), "
              "num_workers=1))", only="vision"),
        raised("data", "RuntimeError|DataLoader worker (pid {pid}) is killed by signal: Bus error. It is possible "
            "that dataloader's workers are "
               "out of shared memory. Please try to raise your shared memory limit.",
               "torch/utils/data/dataloader.py", "_try_get_data",
               "data = self._data_queue.get(timeout=timeout)",
               "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared "
               "memory (shm).", only=TORCH_ONLY),
    )),
    FaultType("missing_extra", FRAMEWORK, "versions", (
        raised("start", "ImportError|Using `low_cpu_mem_usage=True`, a `device_map` or a `tp_plan` requires "
            "Accelerate: `pip install 'accelerate>=0.26.0'`",
               "transformers/modeling_utils.py", "from_pretrained", "raise ImportError(", only="language"),
        raised("start", "ImportError|FlashAttention2 has been toggled on, but it cannot be used due to the "
            "following error: the package flash_attn "
               "seems to be not installed. Please refer to the documentation of https://huggingface.co/docs to "
               "install Flash Attention 2.",
               "transformers/modeling_utils.py", "_check_and_enable_flash_attn_2", "raise ImportError(f\"{preface} "
               "the package\")", only="language"),
    )),
    FaultType("nccl_invalid_usage", FRAMEWORK, "nccl", (
        raised("sync", "torch.distributed.DistBackendError|NCCL error in: "
            "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage "
               "(run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5\nncclInvalidUsage: This usually "
               "reflects invalid usage of NCCL "
               "library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device {bus}",
               "torch/distributed/distributed_c10d.py", "barrier", "work = group.barrier(opts=opts)", only=TORCH_ONLY),
    )),
)  # fmt: skip
