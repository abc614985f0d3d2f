"""What an expression of the source can stand for, as far as the source tells."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A value, where it was written, and how sure it is. `value` is a constant, a list of Known, or one of below."""

    value: Any
    where: str
    sure: float = 0.95

    def weakened(self, factor: float) -> Known:
        """The same value, less sure."""
        return Known(self.value, self.where, self.sure * factor)

    @property
    def constant(self) -> bool:
        """True for a text, a number, a truth value or None."""
        return self.value is None or isinstance(self.value, str | int | float | bool)


@dataclasses.dataclass(slots=True)
class FieldBag:
    """Named values: parsed arguments, an instance, a config file's table, a dict."""

    fields: dict[str, Known]
    made_by: OwnClass | None = None


@dataclasses.dataclass(eq=False, slots=True)
class SourceModule:
    """A module of the user's own: its file, its package, its global names."""

    file: Path | None
    name: str
    package: str
    names: dict[str, Known]
    walked: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class OwnFunction:
    """A function of the user's own, and the names around it; `bound` is the instance that a method belongs to."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    module: SourceModule
    around: Mapping[str, Known]
    bound: Known | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OwnClass:
    """A class of the user's own."""

    node: ast.ClassDef
    module: SourceModule


@dataclasses.dataclass(frozen=True, slots=True)
class InstalledName:
    """A name of installed code: `torch.float16`, `transformers.pipeline`; its result ends with `()`."""

    dotted: str

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.dotted.rpartition(".")[2]


@dataclasses.dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that the source opens or reads."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallSite:
    """A call of installed code: its dotted name (`?.to` on something unknown), its values where they are known."""

    dotted: str
    args: tuple[Known | None, ...]
    kwargs: dict[str, Known | None]
    where: str
    sure: float

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.dotted.rpartition(".")[2]

    def argument(self, place: int, *names: str) -> Known | None:
        """The argument at a place or of one of these names; None if it is not given or not known."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[place] if 0 <= place < len(self.args) else None

    def gives(self, place: int, *names: str) -> bool:
        """True if the argument is given, known or not."""
        return any(name in self.kwargs for name in names) or 0 <= place < len(self.args)
