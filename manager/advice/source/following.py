"""Calls: into the user's own functions and classes, within bounds; calls of installed code go to the recogniser."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from stoker.manager.advice.source.builtin_calls import name_of_call, result_of
from stoker.manager.advice.source.configs import READERS, read_config
from stoker.manager.advice.source.evaluator import Evaluator, SourceFrame
from stoker.manager.advice.source.modules import ModuleFinder
from stoker.manager.advice.source.options import DeclaredOptions
from stoker.manager.advice.source.own_classes import OwnClasses, annotated
from stoker.manager.advice.source.reading import NotReadError, OwnFolders
from stoker.manager.advice.source.recognise import Recogniser
from stoker.manager.advice.source.values import (
    CallSite,
    FieldBag,
    InstalledName,
    Known,
    NamedFile,
    OwnClass,
    OwnFunction,
    SourceModule,
)
from stoker.manager.advice.source.walker import Walker

MOST_TIMES = 3
"""A function is followed from so many calls."""
_PARSERS = frozenset({"parse_args", "parse_known_args", "parse_args_into_dataclasses"})


class Follower:
    """One extraction: the walker and all that it asks."""

    def __init__(self, folders: OwnFolders, *, command_line: Sequence[str], recogniser: Recogniser) -> None:
        self.recogniser = recogniser
        self.notes: list[str] = []
        self.followed: dict[int, ast.AST] = {}
        """The functions that were followed, in order."""
        self.constants: dict[tuple[int, str], str] = {}
        """The values of the global constants that were used, in order."""
        self._folders = folders
        self._options = DeclaredOptions(command_line)
        self._held: dict[tuple[int, str], Recogniser] = {}
        self._active: set[int] = set()
        self._times: dict[int, int] = {}
        self.evaluator = Evaluator(
            call=self._call, used=self._release, field_of_class=self._field_of_class, nodes=folders.limits.nodes
        )
        self._classes = OwnClasses(self.evaluator, self._shown, most_depth=folders.limits.depth)
        self.finder = ModuleFinder(
            folders, walk_module=self.walk_quietly, used_installed=self._used_installed, note=self.note
        )
        self.walker = Walker(self.evaluator, self.finder, recogniser)

    def note(self, why: str) -> None:
        """Keep why something was not read."""
        if why not in self.notes and len(self.notes) < 50:
            self.notes.append(why)

    def walk_quietly(self, module: SourceModule, tree: ast.Module, shown: str) -> None:
        """Walk a module's text for its names. What a statement says counts once a name that it binds is used."""
        frame = SourceFrame(module.names, {}, module, shown, sure=0.9)
        before = self.walker.recogniser
        try:
            for statement in tree.body:
                self.walker.recogniser = held = Recogniser()
                self.walker.walk([statement], frame)
                if held.found or held.further:
                    for name in _names_bound(statement):
                        self._held[id(module), name] = held
        finally:
            self.walker.recogniser = before

    def walk_script(self, module: SourceModule, tree: ast.Module, shown: str) -> None:
        """Walk a program's text as it runs."""
        self.walker.walk(tree.body, SourceFrame(module.names, {}, module, shown))

    def follow(
        self,
        function: OwnFunction,
        args: Sequence[Known | None],
        kwargs: Mapping[str, Known | None],
        *,
        file: str,
        sure: float = 1.0,
        depth: int = 0,
        entry: bool = False,
    ) -> Known | None:
        """Walk a function's body with its parameters bound; returns what it returns, where that is known."""
        node = function.node
        times = self._times.get(id(node), 0)
        if id(node) in self._active or depth > self._folders.limits.depth or times >= MOST_TIMES:
            return None
        self._times[id(node)] = times + 1
        self.followed.setdefault(id(node), node)
        frame = SourceFrame({}, function.around, function.module, file, sure=sure, depth=depth)
        self._bind_parameters(function, args, kwargs, frame, entry=entry)
        self._active.add(id(node))
        try:
            return self.walker.walk(node.body, frame)
        finally:
            self._active.discard(id(node))

    def decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef, module: SourceModule, file: str) -> None:
        """What an entry function's decorators say: `@app(context=causal_lm(...))`, `@click.option(...)`."""
        frame = SourceFrame(dict(module.names), {}, module, file)
        for decorator in reversed(node.decorator_list):
            self.evaluator.value_of(decorator, frame)

    def click_values(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Known]:
        """What click gives a command's parameters: defaults, and what the command line says."""
        names = {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]}
        return {name: value for name, value in self._options.parsed().fields.items() if name in names}

    # ---- what evaluator and finder ask

    def _used_installed(self, top: str, where: str) -> None:
        self.walker.recogniser.used_module(top, where, 0.95)

    def _release(self, module: SourceModule, name: str) -> None:
        """A global name is used: what its statement said counts from now on."""
        value = module.names.get(name)
        if value is not None and value.constant:
            self.constants.setdefault((id(module), name), repr(value.value))
        held = self._held.get((id(module), name))
        if held is not None:
            self.walker.recogniser.take(held)

    def _field_of_class(self, made: OwnClass, name: str, bound: Known | None) -> Known | None:
        return self._classes.attribute(made, name, bound)

    def _call(self, node: ast.Call, frame: SourceFrame) -> Known | None:
        base: Known | None = None
        if isinstance(node.func, ast.Attribute):
            base = self.evaluator.value_of(node.func.value, frame)
            function = self.evaluator.attribute(base, node.func.attr)
        else:
            function = self.evaluator.value_of(node.func, frame)
        args, kwargs = self._arguments(node, frame)
        target = function.value if function is not None else None
        if isinstance(target, OwnFunction):
            file = self._shown(target.module)
            if target.node.decorator_list and not args and not kwargs:
                self.decorators(target.node, target.module, file)
                kwargs = {**self.click_values(target.node)}
            return self.follow(target, args, kwargs, file=file, sure=frame.sure, depth=frame.depth + 1)
        if isinstance(target, OwnClass):
            return self._instance(target, args, kwargs, frame, frame.where(node))
        if isinstance(target, InstalledName):
            name = target.dotted
        elif isinstance(node.func, ast.Attribute):
            name = name_of_call(base, node.func.attr)
        else:
            name = node.func.id if isinstance(node.func, ast.Name) else "?"
        return self._installed(CallSite(name, tuple(args), kwargs, frame.where(node), frame.sure), base, frame)

    def _arguments(self, node: ast.Call, frame: SourceFrame) -> tuple[list[Known | None], dict[str, Known | None]]:
        args = list[Known | None]()
        for arg in node.args:
            found = self.evaluator.value_of(arg, frame)
            if isinstance(arg, ast.Starred):
                args += found.value if found is not None and isinstance(found.value, list) else []
            else:
                args.append(found)
        kwargs = dict[str, Known | None]()
        for keyword in node.keywords:
            found = self.evaluator.value_of(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = found
            elif found is not None and isinstance(found.value, FieldBag):
                kwargs.update(found.value.fields)
        return args, kwargs

    def _installed(self, site: CallSite, base: Known | None, frame: SourceFrame) -> Known | None:
        form = READERS.get(site.dotted)
        if form is not None:
            return self._config(site, form, frame)
        if site.last == "add_argument" or site.dotted in ("click.option", "click.argument"):
            self._options.declare(site)
            return None
        if site.last in _PARSERS:
            return self._parsed(site)
        if site.last.endswith("ArgumentParser") and site.args:
            self._dataclasses(site.args[0])
        found = result_of(site, base)
        if found is not None and isinstance(found.value, NamedFile):
            self.walker.recogniser.opened(found.value, site.where, site.sure)
        if found is not None:
            return found
        self.walker.recogniser.call(site)
        for value in (*site.args, *site.kwargs.values()):
            if value is not None and isinstance(value.value, OwnFunction):  # a callback: it will be called
                own = value.value
                self.follow(own, [], {}, file=self._shown(own.module), sure=0.7, depth=frame.depth + 1)
        return Known(InstalledName(f"{site.dotted}()"), site.where)

    def _config(self, site: CallSite, form: str, frame: SourceFrame) -> Known | None:
        source = site.args[0] if site.args else None
        path = source.value if source is not None else None
        name = path.path if isinstance(path, NamedFile) else path
        if not isinstance(name, str) or (site.last == "loads" and not isinstance(path, NamedFile)):
            self.note(f"{site.where}: the source does not tell which file {site.dotted}(...) reads")
            return None
        try:
            return read_config(name, form, self._folders, beside=frame.module.file)
        except NotReadError as error:
            self.note(str(error))
            return None

    def _parsed(self, site: CallSite) -> Known:
        line = site.argument(0, "args")
        words = None
        if line is not None and isinstance(line.value, list):
            words = [str(each.value) for each in line.value if each is not None]
        values = Known(self._options.parsed(words), site.where)
        for name, value in values.value.fields.items():
            self.walker.recogniser.named(name, value, factor=0.85 * site.sure, further=value.where == "command line")
        if site.last == "parse_known_args":
            return Known([values, None], site.where)
        return Known([values] * 5, site.where) if site.last.endswith("dataclasses") else values

    def _dataclasses(self, given: Known | None) -> None:
        classes = given.value if given is not None and isinstance(given.value, list) else [given]
        for each in classes:
            if each is not None and isinstance(each.value, OwnClass):
                self._options.declare_fields(self._classes.fields(each.value), annotated(each.value))

    # ---- the user's own classes

    def _instance(
        self,
        made: OwnClass,
        args: Sequence[Known | None],
        kwargs: Mapping[str, Known | None],
        frame: SourceFrame,
        where: str,
    ) -> Known:
        bag = FieldBag(self._classes.fields(made), made)
        value = Known(bag, where)
        if self._classes.is_model(made):
            self.walker.recogniser.own_model(made, where, frame.sure)
        start = self._classes.method(made, "__init__")
        if start is not None:
            bound = OwnFunction(start.node, start.module, start.around, value)
            file = self._shown(made.module)
            self.follow(bound, args, kwargs, file=file, sure=frame.sure, depth=frame.depth + 1)
            return value
        for name, given in [*zip(annotated(made), args, strict=False), *kwargs.items()]:
            if given is not None:
                bag.fields[name] = given
            else:
                bag.fields.pop(name, None)
        for name, field in bag.fields.items():
            self.walker.recogniser.named(name, field, factor=0.8 * frame.sure, further=True)
        return value

    # ---- parameters

    def _bind_parameters(
        self,
        function: OwnFunction,
        args: Sequence[Known | None],
        kwargs: Mapping[str, Known | None],
        frame: SourceFrame,
        *,
        entry: bool,
    ) -> None:
        spec = function.node.args
        names = [arg.arg for arg in [*spec.posonlyargs, *spec.args]]
        at_home = SourceFrame(function.module.names, {}, function.module, frame.file, depth=frame.depth)
        bound = dict[str, Known | None]()
        for name, default in zip(reversed(names), reversed(spec.defaults), strict=False):
            bound[name] = _weaker(self.evaluator.value_of(default, at_home))
        for keyword, keyword_default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            bound[keyword.arg] = _weaker(self.evaluator.value_of(keyword_default, at_home))
        if function.bound is not None and names:
            bound[names.pop(0)] = function.bound
        bound.update(zip(names, args, strict=False))
        keywords = {arg.arg for arg in spec.kwonlyargs}
        bound.update({name: value for name, value in kwargs.items() if name in names or name in keywords})
        for name, value in bound.items():
            if value is not None:
                frame.names[name] = value
                self.walker.recogniser.named(name, value, factor=0.8 * frame.sure, further=entry)

    def _shown(self, module: SourceModule) -> str:
        return self._folders.name_of(module.file) if module.file is not None else "<source>"


def _weaker(value: Known | None) -> Known | None:
    return value.weakened(0.85) if value is not None else None


def _names_bound(statement: ast.stmt) -> list[str]:
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
