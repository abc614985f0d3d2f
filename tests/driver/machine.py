"""The machine behind the stand-in `pynvml` of this folder, written and broken by tests."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


class Machine:
    """Its GPUs, in a file. Changing an attribute of `gpus` counts from `write` on."""

    def __init__(self, folder: Path, *gpus: dict[str, Any], **more: Any) -> None:
        self.gpus = [{"uuid": f"GPU-{n}", "memory": 24 * 10**9, **gpu} for n, gpu in enumerate(gpus)]
        self.more = more
        self.file = folder / "nvml.json"
        (folder / "use.d").mkdir(exist_ok=True)
        self.write()

    def write(self, **more: Any) -> None:
        """Make it so, at once."""
        self.more |= more
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps({"gpus": self.gpus, **self.more}))
        draft.replace(self.file)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that sees it."""
        paths = [str(FOLDER), str(FOLDER.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {"STANDIN_NVML": str(self.file), "PYTHONPATH": os.pathsep.join(paths)}


def take(size: float, *, uuid: str = "") -> None:
    """In a library: take this much memory of its GPU in the stand-in."""
    uuid = uuid or os.environ["CUDA_VISIBLE_DEVICES"].partition(",")[0]
    file = Path(os.environ["STANDIN_NVML"]).parent / "use.d" / str(os.getpid())
    draft = file.parent.parent / f"use-{os.getpid()}"
    draft.write_text(json.dumps({uuid: int(size)}))
    draft.replace(file)


def load() -> Any:
    """A new copy of the stand-in, as a separate module."""
    spec = spec_from_file_location("standin_pynvml", FOLDER / "pynvml.py")
    if spec is None or spec.loader is None:
        raise ImportError(FOLDER)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
