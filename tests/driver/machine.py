"""Describe GPUs in a file for the stand-in `pynvml` of this folder; tests change the GPUs."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


class Machine:
    """A machine whose GPUs are described in a file. `write` saves changes of `gpus`."""

    def __init__(self, folder: Path, *gpus: dict[str, Any], **more: Any) -> None:
        self.gpus = [{"uuid": f"GPU-{n}", "memory": 24 * 10**9, **gpu} for n, gpu in enumerate(gpus)]
        self.more = more
        self.file = folder / "nvml.json"
        (folder / "use.d").mkdir(exist_ok=True)
        self.write()

    def write(self, **more: Any) -> None:
        self.more |= more
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps({"gpus": self.gpus, **self.more}))
        draft.replace(self.file)

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(FOLDER), str(FOLDER.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {"STANDIN_NVML": str(self.file), "PYTHONPATH": os.pathsep.join(paths)}


def take(size: float, *, uuid: str = "") -> None:
    """Use this much memory of the library's GPU in the stand-in."""
    uuid = uuid or os.environ["CUDA_VISIBLE_DEVICES"].partition(",")[0]
    file = Path(os.environ["STANDIN_NVML"]).parent / "use.d" / str(os.getpid())
    draft = file.parent.parent / f"use-{os.getpid()}"
    draft.write_text(json.dumps({uuid: int(size)}))
    draft.replace(file)


def load() -> Any:
    spec = spec_from_file_location("standin_pynvml", FOLDER / "pynvml.py")
    if spec is None or spec.loader is None:
        raise ImportError(FOLDER)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
