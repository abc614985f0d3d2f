"""What a compiler has made, kept as a snapshot, so that the first library compiles and the others load.

PyTorch's compiler keeps all that it makes in a folder: graphs, kernels and shared objects. (Its own "cache artifacts",
torch.compiler.save_cache_artifacts, leave out the shared objects of a CPU: a library that started from them called g++
again, 18 s of 27 s.) That folder is the snapshot: it is made once and whole as other snapshots are (`snapshot.py`), it
goes to other pilots under its *form*, and a library works on a copy, so that what others were given never changes.

An artifact that is of no use costs the time to compile, never the load: one that is damaged is moved aside, and one
that was compiled for another machine (files came to its copy) is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from stoker.contexts import ambient
from stoker.contexts.snapshot import make_folder, set_aside, snapshot_facts
from stoker.contexts.state import snapshot_folder
from stoker.units import show_seconds

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Compile = Callable[[Path], Made]
"""Compiles with this folder as the compiler's cache: what is in it is not made again."""
_NOT_KEPT = "just compiled, and not kept"
_CACHE, _LOCKS = "cache", "locks"
_SETTINGS = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
"""No processes that outlive the load; and no precompiled C++ headers, which stay in /tmp with 150 MB each."""
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class _Had(NamedTuple, Generic[Made]):
    """What was made, and True if it was compiled now."""

    made: Made
    is_new: bool


def compile_once(form: str, compile: Compile[Made]) -> tuple[Made, str]:
    """What `compile` makes, from what this or another pilot has kept under this form, else anew; and how it came about.
    Without a form nothing is kept. Raises what compiling raises."""
    if not form:
        return _alone(compile), _NOT_KEPT
    place, came = snapshot_folder() / form, ambient.local_path(form)
    if snapshot_facts(place) is None and (facts := snapshot_facts(came)) is not None:
        had = _from(came, compile, place=place)
        if had is not None and not had.is_new:
            return had.made, f"another pilot compiled it in {show_seconds(float(facts.get('made_s', 0.0)))}"
        if had is not None:
            return had.made, _offered(form, place, "just compiled")
    for _ in range(2):
        found = _keep(place, compile)
        if found is None and snapshot_facts(place) is None:  # the disk takes nothing
            break
        had = _Had(found[0], True) if found else _from(place, compile, place=place)
        if had is not None:
            return had.made, _offered(form, place, "just compiled" if had.is_new else "compiled earlier")
        set_aside(place)
    return _alone(compile), _NOT_KEPT


def _offered(form: str, place: Path, how: str) -> str:
    """Offer what is kept at `place`, if the disk has taken it. How it came about, for people."""
    facts = snapshot_facts(place)
    if facts is None:
        return _NOT_KEPT
    made_s = float(facts.get("made_s", 0.0))
    ambient.offer_snapshot(form, place, made_s=made_s)
    return f"{how} in {show_seconds(made_s)}"


def _keep(place: Path, compile: Compile[Made]) -> tuple[Made] | None:
    """Compile, and keep what comes of it at `place`; None if it is there, or cannot be kept. Raises what compiling
    raises."""
    found: list[Made] = []
    failed: list[Exception] = []

    def write(draft: Path) -> None:
        try:
            found.append(compile(draft / _CACHE))
        except Exception as error:
            failed.append(error)
            raise
        shutil.rmtree(draft / _CACHE / _LOCKS, ignore_errors=True)

    try:
        make_folder(place, write, source="torch.compile")
    except OSError as error:
        if failed:
            raise
        log.warning("what was compiled is not kept in %s: %s", place.parent, error)
    return (found[0],) if found else None


def _from(source: Path, compile: Compile[Made], *, place: Path) -> _Had[Made] | None:
    """What comes of an artifact; None if it is damaged. Where something was compiled in spite of it, that is kept at
    `place`."""
    try:
        with tempfile.TemporaryDirectory(prefix="stoker-compiled-", ignore_cleanup_errors=True) as folder:
            cache = Path(folder, _CACHE)
            shutil.copytree(source / _CACHE, cache)
            before, began = _files(cache), time.monotonic()
            made = compile(cache)
            is_new = _files(cache) != before
            if is_new:
                _replace(place, cache, made_s=time.monotonic() - began)
            return _Had(made, is_new)
    except Exception as error:
        log.warning("what was compiled before, %s, cannot be used (%s); it is compiled again", source, error)
        return None


def _files(cache: Path) -> set[str]:
    """The files that the compiler has made there."""
    found = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != _LOCKS}


def _replace(place: Path, cache: Path, *, made_s: float) -> None:
    """Keep what lies in `cache` in the place of what was compiled for another machine."""
    log.info("%s was compiled for another machine; it is replaced", place)
    shutil.rmtree(place, ignore_errors=True)

    def write(draft: Path) -> None:
        shutil.copytree(cache, draft / _CACHE, ignore=shutil.ignore_patterns(_LOCKS))

    try:
        make_folder(place, write, source="torch.compile", made_s=made_s)
    except OSError as error:
        log.warning("what was compiled is not kept in %s: %s", place.parent, error)


def _alone(compile: Compile[Made]) -> Made:
    with tempfile.TemporaryDirectory(prefix="stoker-compiled-", ignore_cleanup_errors=True) as folder:
        return compile(Path(folder))


@contextlib.contextmanager
def inductor_cache(folder: Path) -> Iterator[None]:
    """The compiler keeps what it makes in this folder during the block, and nothing elsewhere."""
    from torch._inductor import config, utils

    before = {name: os.environ.get(name) for name in _VARIABLES}
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(zip(_VARIABLES, (str(folder), str(folder / "triton")), strict=True))
    utils.clear_inductor_caches()
    try:
        with config.patch({name: value for name, value in _SETTINGS.items() if hasattr(config, name)}):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        utils.clear_inductor_caches()
