"""Options that a program declares (argparse, click, dataclasses read from a command line), and a command line that is
given. What the command line says replaces a default."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence

from stoker.manager.advice.source.facts import COMMAND_LINE
from stoker.manager.advice.source.values import CallSite, FieldBag, InstalledName, Known

_FLAGS = frozenset({"store_true", "store_false", "count"})


@dataclasses.dataclass(slots=True)
class DeclaredOption:
    """An option: its names on the command line, its default, the type of its value, whether it takes none."""

    names: tuple[str, ...]
    default: Known | None
    convert: str = ""
    flag: str = ""

    @property
    def positional(self) -> bool:
        """True for an argument without dashes."""
        return not self.names[0].startswith("-")


class DeclaredOptions:
    """The options of a program by destination, in the order in which they are declared."""

    def __init__(self, command_line: Sequence[str]) -> None:
        self._given = list(command_line)
        self._options: dict[str, DeclaredOption] = {}

    def declare(self, site: CallSite) -> None:
        """Take an `add_argument(...)` or a `click.option(...)`."""
        names = tuple(str(arg.value) for arg in site.args if arg is not None and isinstance(arg.value, str))
        if not names:
            return
        # click names its parameter as the last text without dashes; argparse as `dest`, else as the longest option.
        named = site.kwargs.get("dest")
        bare = [name for name in names if not name.startswith("-")]
        longest = max(names, key=lambda name: (name.startswith("--"), len(name)))
        dest = str(named.value) if named is not None and named.constant else bare[0] if bare else longest
        action, kind = site.kwargs.get("action"), site.kwargs.get("type")
        flag = str(action.value) if action is not None and action.value in _FLAGS else ""
        is_flag = site.kwargs.get("is_flag")
        if is_flag is not None and is_flag.value is True:
            flag = "store_true"
        default = site.kwargs.get("default")
        if default is None and flag in ("store_true", "store_false"):
            default = Known(flag == "store_false", site.where, 0.9)
        convert = kind.value.last.lower() if kind is not None and isinstance(kind.value, InstalledName) else ""
        self._options[dest.lstrip("-").replace("-", "_")] = DeclaredOption(
            tuple(name for name in names if name.startswith("-")) or names, default, convert, flag
        )

    def declare_fields(self, fields: Mapping[str, Known], annotations: Mapping[str, ast.expr]) -> None:
        """Take the fields of a dataclass as options, as `HfArgumentParser` and others do."""
        for name, annotation in annotations.items():
            convert = ast.unparse(annotation).partition("|")[0].strip().lower()
            self._options[name] = DeclaredOption((f"--{name}",), fields.get(name), convert)

    def parsed(self, line: Sequence[str] | None = None) -> FieldBag:
        """The options' values: the defaults, and over them what the command line (or the `line` of the source) says."""
        values = {dest: option.default.weakened(0.9) for dest, option in self._options.items() if option.default}
        by_name = {name: dest for dest, option in self._options.items() for name in option.names}
        for dest in self._options:
            by_name.setdefault("--" + dest, dest)
            by_name.setdefault("--" + dest.replace("_", "-"), dest)
        positional = [dest for dest, option in self._options.items() if option.positional]
        words = list(self._given if line is None else line)
        while words:
            word, equals, text = words.pop(0).partition("=")
            named = by_name.get(word) or _only_beginning(word, by_name)
            if named is None:
                if not word.startswith("-") and not equals and positional:
                    dest = positional.pop(0)
                    values[dest] = _converted(word, self._options[dest])
                continue
            option = self._options[named]
            if option.flag:
                values[named] = Known(option.flag != "store_false", COMMAND_LINE, 1.0)
            elif equals or words:
                values[named] = _converted(text if equals else words.pop(0), option)
        return FieldBag(values)


def _only_beginning(name: str, by_name: Mapping[str, str]) -> str | None:
    """argparse takes the beginning of an option if it is that of one option alone."""
    found = {dest for full, dest in by_name.items() if full.startswith(name)} if name.startswith("--") else set()
    return found.pop() if len(found) == 1 and len(name) > 2 else None


def _converted(text: str, option: DeclaredOption) -> Known:
    kind = option.convert
    default = option.default.value if option.default is not None else None
    if not kind and isinstance(default, int | float) and not isinstance(default, bool):
        kind = type(default).__name__
    value: str | int | float | bool = text
    try:
        if kind in ("int", "integer"):
            value = int(text)
        elif kind == "float":
            value = float(text)
        elif kind == "bool" or isinstance(default, bool):
            value = text.lower() in ("1", "true", "yes", "on")
    except ValueError:
        value = text
    return Known(value, COMMAND_LINE, 1.0)
