"""Stoker keeps models loaded on GPUs that batch jobs get for a limited time.

Most programs need only these names: `app`, `context`, `load`, `map`, `amap`, `kept`, `stream`, `causal_lm`, `encoder`,
`encoder_family`, `family`, and within a call `device`, `gang`, `progress`, `scratch`. The modules below are also
public; all other modules may change between versions:

config      site files: `load_site`, `Site`
console     output on a terminal or a pipe: `Screen`, option types
contexts    recipes, ready-made contexts, checkpoints: `Recipe`, `Awareness`, `saved_state`, `Evicted`
datafile    rows of CSV, JSONL, Parquet and Arrow files
decoding    exceptions that decoders raise for damaged bytes
errors      all errors for users
planning    the work of a run, for `stoker plan`
run_folder  folders of runs that can be stopped and resumed
sessions    facts, forecasts, checkpoints and policies of a session and its calls
toml_files  readers for TOML files of applications
tuning      soft prompts: jobs, data, tuning, the prompt bank
units       sizes and times in text

Python imports each name on first use (PEP 562), so a login node needs no GPU library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stoker.startup import RELEASE, import_deferring_interrupt

__version__ = RELEASE


_HOME = {
    "StokerError": "stoker.errors",
    "StokerExecutor": "stoker.manager.executor.executor",
    "amap": "stoker.manager.executor.async_map",
    "app": "stoker.manager.executor.apps",
    "causal_lm": "stoker.contexts.causal_lm",
    "context": "stoker.contexts",
    "device": "stoker.contexts",
    "encoder": "stoker.contexts.encoder",
    "encoder_family": "stoker.contexts",
    "family": "stoker.contexts",
    "gang": "stoker.contexts",
    "kept": "stoker.manager.executor.kept_file",
    "load": "stoker.manager.executor.session",
    "load_variable_from_serverless": "stoker.contexts",
    "map": "stoker.manager.executor.mapping",
    "progress": "stoker.contexts",
    "scratch": "stoker.contexts",
    "stream": "stoker.manager.executor.stream",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from stoker.contexts import context as context
    from stoker.contexts import device as device
    from stoker.contexts import encoder_family as encoder_family
    from stoker.contexts import family as family
    from stoker.contexts import gang as gang
    from stoker.contexts import load_variable_from_serverless as load_variable_from_serverless
    from stoker.contexts import progress as progress
    from stoker.contexts import scratch as scratch
    from stoker.contexts.causal_lm import causal_lm as causal_lm
    from stoker.contexts.encoder import encoder as encoder
    from stoker.errors import StokerError as StokerError
    from stoker.manager.executor.apps import app as app
    from stoker.manager.executor.async_map import amap as amap
    from stoker.manager.executor.executor import StokerExecutor as StokerExecutor
    from stoker.manager.executor.kept_file import kept as kept
    from stoker.manager.executor.mapping import map as map
    from stoker.manager.executor.session import load as load
    from stoker.manager.executor.stream import stream as stream


_MODULES = (
    "config", "console", "contexts", "datafile", "decoding", "errors", "planning", "run_folder", "sessions",
    "toml_files", "tuning", "units",
)  # fmt: skip
"""The public modules."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"stoker.{name}")
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}") from None
    importlib.import_module("stoker.tracebacks").install_traceback_hooks()
    value = getattr(import_deferring_interrupt(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
