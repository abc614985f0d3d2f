"""What a context is before it is loaded: a value that says how to load it, from what, and what it needs.

A recipe's key is a digest of its content, so the same recipe is the same context wherever it was written (`digest.py`
makes the key, `factory.py` turns a decorated loader into recipes).
"""

from __future__ import annotations

import enum

import msgspec

from stoker.contexts.program_folder import ProgramFolder
from stoker.units import show_bytes, show_seconds


class Awareness(enum.Enum):
    """How much of a context outlives a call (Pervasive Context Management §4.2)."""

    NONE = "none"
    """Nothing: each call starts a fresh interpreter and loads from where the files came from."""
    DISK = "disk"
    """Its files: each call starts a fresh interpreter and loads from the pilot's object cache."""
    FULL = "full"
    """All of it: one library process loads it once and serves call after call."""


class ObjectRef(msgspec.Struct, frozen=True):
    """A content-addressed file or folder.

    `name` is its injective cache name (digest and kind in the name itself), `size_bytes` its length (of a folder: the
    sum), `source` where it can be had first: an absolute path that the pilot may or may not see. `inode` and
    `changed_ns` say which file was there when its content was read, and when it had last been written to; 0 = not
    known, or too short a time before for a later change to show.
    """

    name: str
    size_bytes: int
    source: str = ""
    changed_ns: int = 0
    inode: int = 0


class Needs(msgspec.Struct, frozen=True):
    """What a library of this context takes from a pilot. Declared sizes are limits that are enforced; 0 = not declared.

    `memory_bytes` is host memory, `device_memory_bytes` is memory of each of its `devices` (on a CPU device the two
    are the same memory: the larger counts). `kinds` lists the device kinds that can hold it, best first; empty = any.

    A language model's cache grows with what it serves: that memory has room for `cache_tokens` tokens, and each further
    one takes `token_bytes` (0 = it does not grow).
    """

    devices: int = 1
    device_memory_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    kinds: tuple[str, ...] = ()
    load_limit_s: float = 1800.0
    token_bytes: int = 0
    cache_tokens: int = 0


class LibraryLimits(msgspec.Struct, frozen=True):
    """How many libraries of a context a program wishes for: `least` stay loaded, `most` are loaded at once (0 = any
    number), and one that has been idle for `keep_alive_s` is unloaded, as long as `least` remain (None: it stays until
    its room is wanted).

    They are no part of what a context is: recipes of one key may have different ones, and several programs name each
    their own (`stoker.manager.core.registry`).
    """

    least: int = 0
    most: int = 0
    keep_alive_s: float | None = None


NO_LIMITS = LibraryLimits()


class Recipe(msgspec.Struct, frozen=True):
    """A context recipe.

    `key` identifies the content; `name` is for people (`llm-7f3a`: the loader's name and the first digits of the key).
    `loader` is the cloudpickle of `(function, args, kwargs)`, or empty for the bare context that loads nothing and
    serves calls that want no context. `preload` names modules that the zygote imports before it forks.
    A library runs `slots` calls at once; 0: as many as its context allows once it is loaded (see `slots_of`).
    A library that serves `calls_per_library` calls retires (0 = never). `arguments` are the loader's, in short: they
    tell people which of two recipes of one loader this is. `longest_input`: the longest input that it takes, in tokens,
    where it is a runtime of a family (0 = any; see `runtime_family.py`). `home`: the folder of the program that made
    the recipe; the loader runs in it where the pilot sees it. `named`: the relative paths that the program listed in
    `files`, each with the cache name of its object.
    """

    key: str
    name: str
    loader: bytes = b""
    objects: tuple[ObjectRef, ...] = ()
    needs: Needs = Needs()
    slots: int = 1
    preload: tuple[str, ...] = ()
    awareness: Awareness = Awareness.FULL
    calls_per_library: int = 0
    arguments: str = ""
    limits: LibraryLimits = NO_LIMITS
    longest_input: int = 0
    home: ProgramFolder | None = None
    named: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """What people call it: `llm-7f3a('models/small')`, and `no context` for that of calls that want none."""
        return f"{self.name}{self.arguments}" if self.loader or self.key != BARE.key else "no context"

    def __repr__(self) -> str:
        """One line for people; the fields say the rest."""
        needs, parts = self.needs, [f"recipe {self.title}"]
        if needs.devices != 1:
            parts.append(f"{needs.devices} devices")
        if needs.kinds:
            parts.append("on " + " or ".join(needs.kinds))
        if needs.memory_bytes:
            parts.append(f"memory {show_bytes(needs.memory_bytes)}")
        if needs.device_memory_bytes:
            parts.append(f"device memory {show_bytes(needs.device_memory_bytes)}")
        if self.objects:
            size = sum(part.size_bytes for part in self.objects)
            parts.append(f"{len(self.objects)} object{'s' * (len(self.objects) != 1)} of {show_bytes(size)}")
        if self.longest_input:
            parts.append(f"inputs up to {self.longest_input:,} tokens")
        if self.awareness is not Awareness.FULL:
            parts.append(f"awareness {self.awareness.value}")
        if self.limits.least or self.limits.most:
            parts.append(f"{self.limits.least} to {self.limits.most or 'any number of'} libraries")
        if self.limits.keep_alive_s is not None:
            parts.append(f"kept {show_seconds(self.limits.keep_alive_s)} when idle")
        return f"<{', '.join(parts)}>"


BARE = Recipe(key="bare", name="bare", needs=Needs())
"""The context of calls that want none."""
