"""Check that the public API is documented in Google style.

The public API is what `stoker` and its public modules export, and the public methods of exported classes.

- Each function or class has a docstring. A docstring that starts with "As `name`" refers to another function and needs
  no sections.
- `Args:` names every parameter, of all overloads, and nothing else. The docstring of a class or of its `__init__`
  documents the constructor, unless the class says "Made by" and names the function that programs call. Other dunder
  methods and fields need no `Args:`.
- `Returns:` or `Yields:` is required unless the annotation is `None`. Properties and docstrings whose first word is
  "Return", "Yield" or "True" need neither section.
- `Raises:` names every exception of `stoker.errors` that the function raises itself, or that its docstring mentions
  after "raises". A docstring that starts with "Raise" and the name needs no such section.

    python .ci/check_docstrings.py [folder of the package]      exit status 1, and a line for each failure
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

SECTION = re.compile(r"^(Args|Attributes|Example|Returns|Yields|Raises):$", re.M)
ENTRY = re.compile(r"^    ([*\w][*\w, ]*): ", re.M)
RETURNING = re.compile(r"(Return|Yield|True)\b")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def path_of(module: str, *, root: Path) -> Path:
    """Return the file of a module. `root`: the folder of the package."""
    base = root.parent / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def assigned(tree: ast.Module, name: str) -> ast.expr | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(one, ast.Name) and one.id == name for one in node.targets):
            return node.value
    return None


def exported(tree: ast.Module) -> list[str]:
    """Return the names in `__all__`. If it is missing or computed, return all public names."""
    listed = assigned(tree, "__all__")
    if isinstance(listed, ast.List) and all(isinstance(one, ast.Constant) for one in listed.elts):
        return list(ast.literal_eval(listed))
    imported = [alias.asname for _, alias in imports(tree) if alias.asname == alias.name]
    defined = [node.name for node in tree.body if isinstance(node, Definition)]
    return [name for name in imported + defined if not name.startswith("_")]


def imports(tree: ast.Module) -> Iterator[tuple[str, ast.alias]]:
    """Yield each imported name with its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias) for alias in node.names)


def resolved(module: str, name: str, *, root: Path) -> tuple[Path, list[Definition]]:
    """Return the file and definitions (with overloads) of a name. Follow imports; a constant has no definitions."""
    path = path_of(module, root=root)
    found = [node for node in parsed(path).body if isinstance(node, Definition) and node.name == name]
    if not found:
        for source, alias in imports(parsed(path)):
            if (alias.asname or alias.name) == name and source.startswith(f"{root.name}."):
                return resolved(source, alias.name, root=root)
    return path, found


def sections_of(text: str) -> dict[str, str]:
    """Return a docstring's sections by title. The text before the first section has the empty title."""
    parts = SECTION.split(text)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(text: str) -> set[str]:
    """Return the first name of each entry in a section."""
    return {name.strip("* ") for listed in ENTRY.findall(text) for name in listed.split(",")}


def parameters(overloads: list[Function]) -> list[str]:
    found = []
    for function in overloads[:-1] or overloads:
        taken = function.args
        every = [*taken.posonlyargs, *taken.args, taken.vararg, *taken.kwonlyargs, taken.kwarg]
        found += [one.arg for one in every if one and one.arg not in ("self", "cls")]
    return list(dict.fromkeys(found))


def raised(function: Function, *, errors: frozenset[str]) -> set[str]:
    """Return the errors in a function's own `raise` statements."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and node.exc:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add(ast.unparse(error).rpartition(".")[2])
    return found & errors


def decorators(function: Function) -> set[str]:
    names = (one.func if isinstance(one, ast.Call) else one for one in function.decorator_list)
    return {ast.unparse(name).rpartition(".")[2] for name in names}


def failures(overloads: list[Function], *, errors: frozenset[str], of_class: str = "") -> Iterator[str]:
    """Yield the faults of a function's docstring. `of_class`: the class's docstring, for a constructor."""
    function = overloads[-1]
    text = ast.get_docstring(function) or of_class
    if not text:
        yield "no docstring"
    if not text or text.startswith("As `"):
        return
    sections = sections_of(text)
    taken, named = parameters(overloads), entries(sections.get("Args", ""))
    if missing := [name for name in taken if name not in named]:
        yield f"Args: lacks {', '.join(missing)}"
    if extra := sorted(named - set(taken)):
        yield f"Args: names {', '.join(extra)}, which is not a parameter"
    if not (
        function.returns is None
        or ast.unparse(function.returns) in ("None", "NoReturn")
        or sections.keys() & {"Returns", "Yields"}
        or RETURNING.match(text)
        or decorators(function) & {"property", "cached_property"}
    ):
        yield "Returns: is missing"
    told = set(re.findall(r"\b[Rr]aises? (\w+)", sections[""])) & errors
    first = re.match(r"Raise (\w+)", text)
    known = entries(sections.get("Raises", "")) | ({first[1]} if first else set())
    if missing := sorted((told | raised(function, errors=errors)) - known):
        yield f"Raises: lacks {', '.join(missing)}"


def failures_of_class(node: ast.ClassDef, *, errors: frozenset[str]) -> Iterator[tuple[Definition, str, str]]:
    """Yield the node, name and fault for each fault of a class and its public methods."""
    text = ast.get_docstring(node) or ""
    if not text:
        yield node, node.name, "no docstring"
    methods: dict[str, list[Function]] = {}
    for method in node.body:
        if isinstance(method, Function) and "setter" not in decorators(method):
            methods.setdefault(method.name, []).append(method)
    for name, overloads in methods.items():
        is_constructor = name == "__init__" and not re.search(r"Made by\s+`", text)
        if is_constructor or not name.startswith("_"):
            for failure in failures(overloads, errors=errors, of_class=text if is_constructor else ""):
                yield overloads[-1], f"{node.name}.{name}", failure


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "src" / "stoker")
    modules = assigned(parsed(root / "__init__.py"), "_MODULES")
    assert modules is not None
    errors = frozenset(exported(parsed(root / "errors.py")))
    seen: set[tuple[Path, str]] = set()
    lines = []
    for module in [root.name, *(f"{root.name}.{one}" for one in ast.literal_eval(modules))]:
        for name in exported(parsed(path_of(module, root=root))):
            path, nodes = resolved(module, name, root=root)
            if not nodes or (path, name) in seen:
                continue
            seen.add((path, name))
            if isinstance(nodes[-1], ast.ClassDef):
                found = list(failures_of_class(nodes[-1], errors=errors))
            else:
                functions = [node for node in nodes if isinstance(node, Function)]
                found = [(nodes[-1], name, failure) for failure in failures(functions, errors=errors)]
            lines += [f"{path}:{node.lineno}: {shown}: {failure}" for node, shown, failure in found]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if not lines:
        sys.stdout.write(f"{len(seen)} public functions and classes: every docstring has its sections\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
