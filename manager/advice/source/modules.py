"""Modules of the user's own by their import statements: read, walked once, never imported."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from stoker.manager.advice.source.evaluator import SourceFrame
from stoker.manager.advice.source.reading import NotReadError, OwnFolders
from stoker.manager.advice.source.values import InstalledName, Known, SourceModule


def parsed(text: str, name: str) -> ast.Module:
    """The tree of a source. Raises NotReadError."""
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise NotReadError(f"{name}: not read: line {error.lineno} does not parse ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise NotReadError(f"{name}: not read: it does not parse ({str(error) or type(error).__name__})") from None


class ModuleFinder:
    """Binds import statements. `walk_module` walks a module's text the first time that it is imported."""

    def __init__(
        self,
        folders: OwnFolders,
        *,
        walk_module: Callable[[SourceModule, ast.Module, str], None],
        used_installed: Callable[[str, str], None],
        note: Callable[[str], None],
    ) -> None:
        self._folders = folders
        self._walk_module = walk_module
        self._used_installed = used_installed
        self._note = note
        self._modules: dict[Path, SourceModule | None] = {}

    def know(self, module: SourceModule) -> None:
        """A module that is walked already: one that imports it gets it as far as it is."""
        if module.file is not None:
            self._modules[module.file.resolve()] = module

    def bind_import(self, node: ast.Import | ast.ImportFrom, frame: SourceFrame) -> None:
        """Bind the names that an import statement binds."""
        where = frame.where(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                module = self._module(alias.name, frame)
                if module is not None and not alias.asname and "." in alias.name:
                    module = self._as_packages(alias.name, module, frame)
                value = module if module is not None else InstalledName(name)
                frame.names[alias.asname or name] = Known(value, where)
                if module is None:
                    self._used_installed(name.partition(".")[0], where)
            return
        base = _absolute(node, frame.module.package)
        beside = frame.module.file
        module = self._module(base, frame) if base else None
        for alias in node.names:
            below = self._module(f"{base}.{alias.name}" if base else alias.name, frame)
            if alias.name == "*":
                if module is not None:
                    frame.names.update(module.names)
            elif module is not None and alias.name in module.names:
                frame.names[alias.asname or alias.name] = module.names[alias.name]
            elif below is not None:
                frame.names[alias.asname or alias.name] = Known(below, where)
            elif module is None and not node.level and self._folders.module(base, beside=beside) is None:
                frame.names[alias.asname or alias.name] = Known(InstalledName(f"{base}.{alias.name}"), where)
                self._used_installed(base.partition(".")[0], where)
            elif module is None and node.level:
                self._note(f"{where}: {'.' * node.level}{node.module or ''} is not in the folders given")

    def _as_packages(self, dotted: str, module: SourceModule, frame: SourceFrame) -> SourceModule:
        """`import a.b.c` binds `a`, from which `a.b.c` is reached."""
        parts = dotted.split(".")
        child = module
        for depth in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:depth])
            package = self._module(name, frame) or SourceModule(None, name, name, {})
            package.names[parts[depth]] = Known(child, "")
            child = package
        return child

    def _module(self, dotted: str, frame: SourceFrame) -> SourceModule | None:
        path = self._folders.module(dotted, beside=frame.module.file)
        if path is None:
            return None
        try:
            real = path.resolve()
            if real in self._modules:
                return self._modules[real]
            self._modules[real] = None
            shown = self._folders.name_of(path)
            tree = parsed(self._folders.read(path), shown)
        except NotReadError as error:
            self._note(str(error))
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            self._note(f"{dotted}: not read: {error}")
            return None
        package = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]
        module = self._modules[real] = SourceModule(path, dotted, package, {})
        self._walk_module(module, tree, shown)
        return module


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    above = parts[: len(parts) - (node.level - 1)] if node.level > 1 else parts
    return ".".join([*above, *([node.module] if node.module else [])])
