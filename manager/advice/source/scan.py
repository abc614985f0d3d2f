"""Scan source code for literals in signatures, constants, calls, argparse and click options, dataclasses and configs.
Each statement is read once, in order. A global variable is evaluated at its first use, so unused code yields no facts.
A function of the user is scanned at its first call, with its arguments."""

from __future__ import annotations

import ast
import dataclasses
import os.path
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from stoker.manager.advice.source import reading
from stoker.manager.advice.source.facts import FactRecogniser
from stoker.manager.advice.source.reading import (
    ADD_ARGUMENT,
    CONFIG_READERS,
    LONGEST_TEXT,
    CallSite,
    Function,
    ImportedName,
    Known,
    NamedFile,
    NotReadError,
    Scope,
    SourceModule,
    UserCode,
    UserFolders,
    arithmetic,
    item,
    module_file,
    option,
    parsed,
    read_config,
    result,
    result_of_method,
)

Values = Mapping[str, Known | None]

_UNDECIDED = 0.85
_PARSERS = frozenset({"parse_args", "parse_known_args", "parse_args_into_dataclasses"})
_MODEL_BASES = ("Module", "PreTrainedModel", "Model")


class Scanner:
    """Scans one function or script. `returned`: the scanned functions and their results. `constants`: values of global
    variables."""

    def __init__(self, folders: UserFolders) -> None:
        self.recogniser = FactRecogniser()
        self.notes: dict[str, None] = {}
        self.returned: dict[ast.AST, Known | None] = {}
        self.constants: dict[tuple[str, str], str] = {}
        self._folders = folders
        self._nodes_left = reading.MOST_NODES
        self._modules: dict[str, SourceModule | None] = {}
        self._scanned: set[ast.stmt] = set()
        self._options: dict[str, Known] = {}

    def note(self, why: str) -> None:
        self.notes[why] = None

    def script(self, module: SourceModule, tree: ast.Module) -> None:
        module.names["__name__"] = Known("__main__")
        module.waiting.clear()
        self._run(tree.body, Scope(ChainMap(module.names), module))

    def enter(self, module: SourceModule, node: Function, arguments: Mapping[str, Known]) -> None:
        scope = Scope(ChainMap(module.names), module)
        given = {**self._arguments_from_decorators(node, scope), **arguments}
        self._follow(UserCode(node, scope), [], given, scope, entry=True)

    # ---- statements

    def _run(self, body: Sequence[ast.stmt], scope: Scope, factor: float = 1.0) -> None:
        before, scope.sure = scope.sure, scope.sure * factor
        for node in body:
            self._count()
            self._scan_statement(node, scope)
            if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
                break
        scope.sure = before

    def _scan_statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Return(value=value):
                found = self.value(value, scope)
                scope.returned = scope.returned or found
            case ast.Assign(targets=targets, value=value):
                found = self.value(value, scope)
                for target in targets:
                    self._bind(target, found, scope)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._bind(target, self.value(value, scope), scope)
            case ast.If(test=test, body=body, orelse=orelse):
                decided = self.value(test, scope)
                if decided is not None and decided.constant and decided.sure > 0.7:
                    self._run(body if decided.value else orelse, scope)
                else:
                    self._run(body, scope, _UNDECIDED)
                    self._run(orelse, scope, _UNDECIDED)
            case ast.For() | ast.AsyncFor():
                self._loop(node, scope)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for each in items:
                    entered = self.value(each.context_expr, scope)
                    if each.optional_vars is not None:
                        self._bind(each.optional_vars, entered, scope)
                self._run(body, scope)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                scope.names[name] = Known(UserCode(node, scope))
            case ast.Import() | ast.ImportFrom():
                self._import(node, scope)
            case _:
                self._inside(node, scope)

    def _inside(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.expr():
                    self.value(child, scope)
                case ast.stmt():
                    self._run([child], scope)
                case ast.ExceptHandler(body=body) | ast.match_case(body=body):
                    self._run(body, scope, 0.5)
                case ast.comprehension():
                    self._inside(child, scope)

    def _loop(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        iterated = self.value(node.iter, scope)
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        self._bind(node.target, None, scope)
        if iterated is not None and isinstance(iterated.value, range | list):
            self.recogniser.loop(name, Known(len(iterated.value), iterated.sure * scope.sure))
            first = iterated.value[0] if isinstance(iterated.value, list) and iterated.value else None
            if name and first is not None:  # not `_bind`: it would record a loop variable as a setting
                scope.names[name] = first.scaled(0.7)
        self._run(node.body, scope)
        self._run(node.orelse, scope)

    def _bind(self, target: ast.expr, value: Known | None, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                self._set(scope.names, name, value, scope)
            case ast.Attribute(value=base) | ast.Subscript(value=base):
                owner = self.value(base, scope)
                key = self.value(target.slice, scope) if isinstance(target, ast.Subscript) else Known(target.attr)
                if owner is not None and isinstance(owner.value, dict) and key is not None and key.constant:
                    self._set(owner.value, str(key.value), value, scope)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = value.value if value is not None and isinstance(value.value, list) else []
                for place, each in enumerate(targets):
                    inner = each.value if isinstance(each, ast.Starred) else each
                    self._bind(inner, values[place] if len(values) == len(targets) else None, scope)

    def _set(self, names: MutableMapping[str, Known], name: str, value: Known | None, scope: Scope) -> None:
        if value is None:
            names.pop(name, None)
            return
        names[name] = value
        if value.constant:
            self.recogniser.named(name, value, factor=0.75 * scope.sure)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        file = scope.module.file
        places = (file.parent, *self._folders.roots) if file is not None else self._folders.roots
        base = ""
        if isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            if node.level:
                package = [file.parent, *file.parent.parents][node.level - 1 :][:1] if file is not None else []
                places = tuple(folder.parent for folder in package)
                base = "".join(f"{folder.name}." for folder in package) + base
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            name = ImportedName(base + alias.name if base or alias.asname else bound, places)
            if alias.name == "*":
                module = self._module(module_file(base.split(".")[:-1], places))
                scope.module.stars += [module] if module is not None else []
            elif (known := self._resolve(name) if base else Known(name)) is not None:
                scope.names[bound] = known
            if self._find_user_module(name)[0] is None:
                self.recogniser.record_framework_of_module(name.dotted.partition(".")[0], 0.95)

    # ---- names

    def _global(self, module: SourceModule, name: str) -> Known | None:
        """Scan the statements that bind a global variable, and return the value of the variable."""
        for node in module.waiting.pop(name, ()):
            if node not in self._scanned:
                self._scanned.add(node)
                self._run([node], Scope(ChainMap(module.names), module, sure=0.9))
        found = module.names.get(name)
        if found is None and name != "*":
            self._global(module, "*")
            stars, module.stars = module.stars, []  # avoids endless recursion of circular imports
            found = next((known for star in stars if (known := self._global(star, name)) is not None), None)
            module.stars = stars
        elif found is not None and found.constant and not name.startswith("__"):
            self.constants.setdefault((module.shown, name), repr(found.value))
        return found

    def _find_user_module(self, name: ImportedName) -> tuple[Path | None, list[str]]:
        """Split off the longest prefix that is a module of the user. Return its file and the rest."""
        parts = name.dotted.split(".")
        for count in range(len(parts), 0, -1):
            if file := module_file(parts[:count], name.places):
                return file, parts[count:]
        return None, parts

    def _resolve(self, name: ImportedName, sure: float = 0.95) -> Known | None:
        """Return the value of a name from the user's modules. Return any other imported name unchanged."""
        file, rest = self._find_user_module(name)
        if file is None or not rest:
            return Known(name, sure)
        module = self._module(file)
        found = self._global(module, rest[0]) if module is not None else None
        for part in rest[1:]:
            found = self._attribute(found, part)
        return found

    def _module(self, path: Path | None) -> SourceModule | None:
        if path is None:
            return None
        real = os.path.realpath(path)
        if real not in self._modules:
            self._modules[real], shown = None, self._folders.name_of(path)
            try:
                self._modules[real] = SourceModule(path, shown, parsed(self._folders.read(path), shown))
            except NotReadError as error:
                self.note(str(error))
        return self._modules[real]

    # ---- expressions

    def value(self, node: ast.expr | None, scope: Scope) -> Known | None:
        if node is None:
            return None
        self._count()
        match node:
            case ast.Constant(value=None | str() | int() | float() as value):
                return Known(value)
            case ast.Name(id=name):
                found = scope.names.get(name)
                return found if found is not None else self._global(scope.module, name)
            case ast.Attribute(value=base, attr=name):
                return self._attribute(self.value(base, scope), name)
            case ast.Call():
                return self._call(node, scope)
            case ast.JoinedStr(values=parts):
                return self._joined(parts, scope)
            case ast.BinOp(left=left, op=op, right=right):
                return arithmetic(op, self.value(left, scope), self.value(right, scope))
            case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
                found = self.value(operand, scope)
                if found is not None and found.constant and isinstance(op, ast.Not):
                    return Known(not found.value, found.sure)
                is_number = found is not None and isinstance(found.value, int | float)
                return Known(-found.value, found.sure) if found is not None and is_number else None
            case ast.Compare(
                left=left, ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() as op], comparators=[right]
            ):
                a, b = self.value(left, scope), self.value(right, scope)
                if a is None or b is None or not (a.constant and b.constant):
                    return None
                return Known((a.value == b.value) == isinstance(op, ast.Eq | ast.Is), min(a.sure, b.sure))
            case ast.Subscript(value=base, slice=index):
                return item(self.value(base, scope), self.value(index, scope))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return Known([self.value(element, scope) for element in elements])
            case ast.Dict(keys=keys, values=values):
                pairs = [(self.value(k, scope), self.value(v, scope)) for k, v in zip(keys, values, strict=True)]
                return Known({str(k.value): v for k, v in pairs if k and k.constant and v is not None})
            case ast.Await(value=inner) | ast.Starred(value=inner):
                return self.value(inner, scope)
        self._inside(node, scope)
        return None

    def _attribute(self, base: Known | None, name: str) -> Known | None:
        match base.value if base is not None else None:
            case ImportedName(dotted=dotted, places=places) if base is not None:
                return self._resolve(ImportedName(f"{dotted}.{name}", places), base.sure)
            case dict() as named:
                return named.get(name)
            case UserCode(node=ast.ClassDef()) as made:
                return self._fields(made).get(name)
            case str() as path if base is not None and name in ("parent", "name", "stem"):
                return Known(str(getattr(Path(path), name)), base.sure)
        return None

    def _joined(self, parts: list[ast.expr], scope: Scope) -> Known | None:
        found = [self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope) for part in parts]
        known = [each for each in found if each is not None and each.constant]
        text = "".join(str(each.value) for each in known)
        if len(known) < len(found) or len(text) > LONGEST_TEXT:
            return None
        return Known(text, min((each.sure for each in known), default=0.95))

    def _count(self) -> None:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            most = f"{reading.MOST_NODES:,}"
            raise NotReadError(f"the source has more than {most} expressions; only the first of them were read")

    # ---- calls

    def _call(self, node: ast.Call, scope: Scope) -> Known | None:
        base: Known | None = None
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value, scope)
            target = self._attribute(base, node.func.attr)
        else:
            target = self.value(node.func, scope)
        args, kwargs = list[Known | None](), dict[str, Known | None]()
        for arg in node.args:
            found = self.value(arg, scope)
            if not isinstance(arg, ast.Starred):
                args.append(found)
            elif found is not None and isinstance(found.value, list):
                args += found.value
        for keyword in node.keywords:
            found = self.value(keyword.value, scope)
            if keyword.arg is not None:
                kwargs[keyword.arg] = found
            elif found is not None and isinstance(found.value, dict):
                kwargs.update(found.value)
        match target.value if target is not None else None:
            case UserCode(node=ast.ClassDef()) as own:
                return self._instance(own, args, kwargs, scope)
            case UserCode(node=function, around=around) as own:
                if isinstance(function, Function) and function.decorator_list and not args and not kwargs:
                    kwargs = {**self._arguments_from_decorators(function, around)}
                return self._follow(own, args, kwargs, scope)
            case ImportedName(dotted=name):
                pass
            case _ if isinstance(node.func, ast.Attribute):
                owner = base.value.dotted if base is not None and isinstance(base.value, ImportedName) else "?"
                name = f"{owner}.{node.func.attr}"
            case _:
                name = node.func.id if isinstance(node.func, ast.Name) else "?"
        return self._installed(CallSite(name, tuple(args), kwargs, scope.where(node), scope.sure), base, scope)

    def _follow(
        self,
        own: UserCode,
        args: Sequence[Known | None],
        kwargs: Values,
        caller: Scope,
        *,
        sure: float = 1.0,
        entry: bool = False,
    ) -> Known | None:
        """Scan a function of the user at its first call, and return its result."""
        node, around = own.node, own.around
        if node in self.returned or caller.depth > reading.DEEPEST_CALLS or isinstance(node, ast.ClassDef):
            return self.returned.get(node)
        self.returned[node] = None
        enclosing = [names for names in around.names.maps if names is not around.module.names]
        scope = Scope(ChainMap({}, *enclosing), around.module, caller.sure * sure, caller.depth + 1)
        spec = node.args
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        named_only = [arg.arg for arg in spec.kwonlyargs]
        bound: dict[str, Known | None] = dict.fromkeys([*names, *named_only])
        defaults: dict[str, ast.expr | None] = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        for name, default in (defaults | dict(zip(named_only, spec.kw_defaults, strict=True))).items():
            found = self.value(default, around)
            bound[name] = found.scaled(_UNDECIDED) if found is not None else None
        if own.bound is not None and names:
            bound[names.pop(0)] = own.bound
        bound.update(zip(names, args, strict=False))
        bound.update({name: value for name, value in kwargs.items() if name in bound})
        for name, value in bound.items():
            if value is not None:
                scope.names[name] = value
                self.recogniser.named(name, value, factor=0.8 * scope.sure, further=entry)
        self._run(node.body, scope)
        self.returned[node] = scope.returned
        return scope.returned

    def _installed(self, site: CallSite, base: Known | None, scope: Scope) -> Known | None:
        if site.dotted in CONFIG_READERS:
            return self._config(site, scope.module)
        if site.last == ADD_ARGUMENT or site.dotted in ("click.option", "click.argument"):
            self._options.update(option(site))
            return None
        if site.last in _PARSERS:
            return self._parsed(site, scope)
        if site.last.endswith("ArgumentParser"):
            given = site.args[0] if site.args else None
            for each in given.value if given is not None and isinstance(given.value, list) else [given]:
                if each is not None and isinstance(each.value, UserCode):
                    self._options.update(self._fields(each.value))
        found = result_of_method(site, base) or result(site)
        if found is not None:
            if isinstance(found.value, NamedFile):
                self.recogniser.opened(found.value, site.sure)
            return found
        self.recogniser.call(site)
        for value in (*site.args, *site.kwargs.values()):
            if value is not None and isinstance(value.value, UserCode):  # a callback
                self._follow(value.value, [], {}, scope, sure=0.7)
        return Known(ImportedName(f"{site.dotted}()"))

    # ---- options and configs

    def _parsed(self, site: CallSite, scope: Scope) -> Known:
        self._global(scope.module, ADD_ARGUMENT)
        options = {name: value.scaled(0.9) for name, value in self._options.items()}
        for name, value in options.items():
            self.recogniser.named(name, value, factor=0.85 * site.sure)
        values = Known(options)
        if site.last == "parse_args":
            return values
        return Known([values] * 5 if site.last.endswith("dataclasses") else [values, None])

    def _arguments_from_decorators(self, node: Function, scope: Scope) -> dict[str, Known]:
        for decorator in reversed(node.decorator_list):
            self.value(decorator, scope)
        names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
        return {name: value.scaled(0.9) for name, value in self._options.items() if name in names}

    def _config(self, site: CallSite, module: SourceModule) -> Known | None:
        path = site.args[0].value if site.args and site.args[0] is not None else None
        name = path.path if isinstance(path, NamedFile) else path
        if not isinstance(name, str) or (site.last == "loads" and not isinstance(path, NamedFile)):
            self.note(f"{site.where}: the source does not show which file {site.dotted}(...) reads")
            return None
        try:
            return read_config(name, CONFIG_READERS[site.dotted], self._folders, beside=module.file)
        except NotReadError as error:
            self.note(str(error))
            return None

    # ---- classes

    def _instance(self, made: UserCode, args: Sequence[Known | None], kwargs: Values, scope: Scope) -> Known:
        """Scan `__init__` of a new instance, and return the fields and methods of the instance."""
        fields = self._fields(made)
        value = Known(fields)
        for name, field in fields.items():
            if isinstance(field.value, UserCode):
                fields[name] = Known(dataclasses.replace(field.value, bound=value))
        bases = made.node.bases if isinstance(made.node, ast.ClassDef) else []
        if any(ast.unparse(base).endswith(_MODEL_BASES) for base in bases):
            self.recogniser.keep("model", made.node.name, 0.7 * scope.sure)
        if "__init__" in fields:
            self._follow(fields.pop("__init__").value, args, kwargs, scope)
            return value
        annotated = (n.target for n in made.node.body if isinstance(n, ast.AnnAssign))
        names = (target.id for target in annotated if isinstance(target, ast.Name))
        for name, each in [*zip(names, args, strict=False), *kwargs.items()]:
            fields.pop(name, None)
            if each is not None:
                fields[name] = each
        for name, field in fields.items():
            self.recogniser.named(name, field, factor=0.8 * scope.sure, further=True)
        return value

    def _fields(self, made: UserCode) -> dict[str, Known]:
        fields, inside = dict[str, Known](), Scope(ChainMap({}, *made.around.names.maps), made.around.module)
        for base in made.node.bases if isinstance(made.node, ast.ClassDef) else ():
            known = self.value(base, inside)
            if known is not None and isinstance(known.value, UserCode) and known.value.node is not made.node:
                fields |= self._fields(known.value)
        for node in made.node.body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    fields[name] = Known(UserCode(node, made.around))
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=value)
                ):
                    found = self.value(value, inside)
                    if found is not None and not isinstance(found.value, ImportedName):
                        fields[name] = found.scaled(0.9)
        return fields
