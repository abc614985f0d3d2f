"""Scan source code for literals in signatures, constants, calls, argparse and click options, dataclasses and configs.

Each statement is read once, in order, and a literal is stored under the name that the statement binds. A global
variable is evaluated at its first use, so unused code yields no facts. A function of the user is scanned at its first
call, with the arguments of this call.
"""

from __future__ import annotations

import ast
import dataclasses
import os.path
from collections.abc import Mapping, Sequence

from stoker.manager.advice.source.facts import Recogniser
from stoker.manager.advice.source.reading import (
    ADD_ARGUMENT,
    CONFIG_READERS,
    LONGEST_TEXT,
    CallSite,
    InstalledName,
    Known,
    NamedFile,
    NotReadError,
    OwnFolders,
    OwnModules,
    SourceModule,
    arithmetic,
    compared,
    item,
    option_name_and_default,
    read_config,
    result_of,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Values = Mapping[str, Known | None]

_UNDECIDED = 0.85
_PARSERS = frozenset({"parse_args", "parse_known_args", "parse_args_into_dataclasses"})
_MODEL_BASES = ("Module", "PreTrainedModel", "Model")


class OutOfBoundsError(Exception):
    """The source code has more statements and expressions than the limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnCode:
    node: Function | ast.ClassDef
    around: Scope
    bound: Known | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Scope:
    """The names that are visible in a part of the source code. `sure`: factor by which the certainty of facts from this
    scope is multiplied."""

    names: dict[str, Known]
    module: SourceModule
    outer: Scope | None = None
    sure: float = 1.0
    depth: int = 0
    returned: Known | None = None

    def where(self, node: ast.AST) -> str:
        return f"{self.module.shown}:{getattr(node, 'lineno', 0)}"


class Scanner:
    """Scans one function or script. `followed`: the functions of the user that the scanned code calls. `constants`: the
    values of global variables."""

    def __init__(self, folders: OwnFolders) -> None:
        self.recogniser = Recogniser()
        self.notes: list[str] = []
        self.followed: dict[int, ast.AST] = {}
        self.constants: dict[tuple[int, str], str] = {}
        self._folders = folders
        self._nodes_left = folders.limits.nodes
        self._modules = OwnModules(folders, note=self.note)
        self._options: dict[str, Known] = {}
        self._returned: dict[int, Known | None] = {}

    def note(self, why: str) -> None:
        if why not in self.notes:
            self.notes.append(why)

    def script(self, module: SourceModule, tree: ast.Module) -> None:
        module.name = "__main__"
        self._run(tree.body, Scope(module.names, module))

    def enter(self, module: SourceModule, tree: ast.Module, node: Function, arguments: Mapping[str, Known]) -> None:
        module.defer_statements(tree)
        scope = Scope(module.names, module)
        self._scan_call_of_own_function(
            OwnCode(node, scope), [], {**self._arguments_from_decorators(node, scope), **arguments}, scope, entry=True
        )

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
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, self.value(value, scope), scope)
            case ast.AugAssign(target=target, value=value):
                self.value(value, scope)
                self._bind(target, None, scope)
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
                scope.names[name] = Known(OwnCode(node, scope), scope.where(node))
            case ast.Import() | ast.ImportFrom():
                self._scan_import(node, scope)
            case ast.AnnAssign():
                pass
            case _:
                self._inside(node, scope)

    def _inside(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, scope)
            elif isinstance(child, ast.stmt):
                self._run([child], scope)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                self._run(child.body, scope, 0.5 if isinstance(child, ast.ExceptHandler) else _UNDECIDED)
            elif isinstance(child, ast.comprehension):
                self._inside(child, scope)

    def _loop(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        iterated = self.value(node.iter, scope)
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        self._bind(node.target, None, scope)
        if iterated is not None and isinstance(iterated.value, range | list):
            times = Known(len(iterated.value), iterated.where, iterated.sure * scope.sure)
            self.recogniser.loop(name, times)
            first = iterated.value[0] if isinstance(iterated.value, list) and iterated.value else None
            if name and first is not None:  # _bind would record a loop variable as a setting
                scope.names[name] = first.with_scaled_certainty(0.7)
        self._run(node.body, scope)
        self._run(node.orelse, scope)

    def _bind(self, target: ast.expr, value: Known | None, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                self._set(scope.names, name, value, scope)
            case ast.Attribute(value=base, attr=name):
                owner = self.value(base, scope)
                if owner is not None and isinstance(owner.value, dict):
                    self._set(owner.value, name, value, scope)
            case ast.Subscript(value=base, slice=index):
                owner, key = self.value(base, scope), self.value(index, scope)
                if owner is not None and isinstance(owner.value, dict) and key is not None and key.constant:
                    self._set(owner.value, str(key.value), value, scope)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = value.value if value is not None and isinstance(value.value, list) else []
                for place, each in enumerate(targets):
                    inner = each.value if isinstance(each, ast.Starred) else each
                    self._bind(inner, values[place] if len(values) == len(targets) else None, scope)

    def _set(self, names: dict[str, Known], name: str, value: Known | None, scope: Scope) -> None:
        if value is None:
            names.pop(name, None)
            return
        names[name] = value
        if value.constant:
            self.recogniser.named(name, value, factor=0.75 * scope.sure)

    # ---- expressions

    def value(self, node: ast.expr | None, scope: Scope) -> Known | None:
        if node is None:
            return None
        self._count()
        where = scope.where(node)
        match node:
            case ast.Constant(value=None | str() | int() | float() as value):
                return Known(value, where)
            case ast.Name(id=name):
                return self._name(name, scope, where)
            case ast.Attribute(value=base, attr=name):
                return self._evaluate_attribute(self.value(base, scope), name, where)
            case ast.Call():
                return self._call(node, scope)
            case ast.JoinedStr(values=parts):
                return self._joined(parts, scope, where)
            case ast.BinOp(left=left, op=op, right=right):
                return arithmetic(op, self.value(left, scope), self.value(right, scope), where)
            case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
                found = self.value(operand, scope)
                if found is None or not found.constant:
                    return None
                if isinstance(op, ast.Not):
                    return Known(not found.value, where, found.sure)
                return Known(-found.value, where, found.sure) if isinstance(found.value, int | float) else None
            case ast.BoolOp(op=ast.Or(), values=values):
                return next(
                    (v.with_scaled_certainty(0.8) for v in [self.value(v, scope) for v in values] if v and v.value),
                    None,
                )
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return compared(op, self.value(left, scope), self.value(right, scope), where)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                decided, yes, no = self.value(test, scope), self.value(body, scope), self.value(orelse, scope)
                if decided is not None and decided.constant:
                    return yes if decided.value else no
                return (
                    yes.with_scaled_certainty(0.6)
                    if yes is not None
                    else no.with_scaled_certainty(0.5)
                    if no is not None
                    else None
                )
            case ast.Subscript(value=base, slice=index):
                return item(self.value(base, scope), self.value(index, scope))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return Known([self.value(element, scope) for element in elements], where)
            case ast.Dict(keys=keys, values=values):
                pairs = [(self.value(k, scope), self.value(v, scope)) for k, v in zip(keys, values, strict=True)]
                return Known({str(k.value): v for k, v in pairs if k and k.constant and v is not None}, where)
            case ast.NamedExpr(target=target, value=inner):
                found = self.value(inner, scope)
                self._bind(target, found, scope)
                return found
            case ast.Await(value=inner) | ast.Starred(value=inner):
                return self.value(inner, scope)
            case ast.Lambda():
                return None
        self._inside(node, scope)
        return None

    def _name(self, name: str, scope: Scope, where: str) -> Known | None:
        inner: Scope | None = scope
        while inner is not None and inner.names is not inner.module.names:
            if name in inner.names:
                return inner.names[name]
            inner = inner.outer
        found = self._resolve_global(scope.module, name)
        if found is None and name == "__name__":
            return Known(scope.module.name, where)
        if found is None and name == "__file__" and scope.module.file is not None:
            return Known(str(scope.module.file), where)
        return found

    def _resolve_global(self, module: SourceModule, name: str) -> Known | None:
        """Return the value of a module's global variable. At the first use of the variable, the statements that bind it
        are scanned."""
        for node in module.waiting.pop(name, ()):
            if id(node) not in module.scanned:
                module.scanned.add(id(node))
                self._run([node], Scope(module.names, module, sure=0.9))
        found: Known | None = module.names.get(name)
        if found is None and name != "*":
            self._resolve_global(module, "*")
            stars, module.stars = module.stars, []  # two modules may import each other's names
            found = next((known for star in stars if (known := self._resolve_global(star, name)) is not None), None)
            module.stars = stars
        elif found is not None and found.constant:
            self.constants.setdefault((id(module), name), repr(found.value))
        return found

    def _evaluate_attribute(self, base: Known | None, name: str, where: str) -> Known | None:
        match base.value if base is not None else None:
            case InstalledName(dotted=dotted) if base is not None:
                return Known(InstalledName(f"{dotted}.{name}"), where, base.sure)
            case dict() as named:
                return named.get(name)
            case SourceModule() as module:
                return self._member(module, name)
            case OwnCode(node=ast.ClassDef()) as made:
                return self._fields(made).get(name)
            case str() as path if base is not None and name in ("parent", "name", "stem"):
                last = os.path.basename(path)
                parts = {"parent": os.path.dirname(path), "name": last, "stem": os.path.splitext(last)[0]}
                return Known(parts[name], base.where, base.sure)
        return None

    def _member(self, module: SourceModule, name: str) -> Known | None:
        found = self._resolve_global(module, name)
        if found is None and (submodule := self._modules.submodule(module, name)) is not None:
            return Known(submodule, "")
        return found

    def _joined(self, parts: list[ast.expr], scope: Scope, where: str) -> Known | None:
        found = [self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope) for part in parts]
        formatted = any(isinstance(part, ast.FormattedValue) and part.format_spec for part in parts)
        known = [each for each in found if each is not None and each.constant]
        text = "".join(str(each.value) for each in known)
        if formatted or len(known) < len(found) or len(text) > LONGEST_TEXT:
            return None
        return Known(text, where, min((each.sure for each in known), default=0.95))

    def _call(self, node: ast.Call, scope: Scope) -> Known | None:
        base: Known | None = None
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value, scope)
            target = self._evaluate_attribute(base, node.func.attr, scope.where(node))
        else:
            target = self.value(node.func, scope)
        args, kwargs = self._arguments(node, scope)
        match target.value if target is not None else None:
            case OwnCode(node=ast.ClassDef()) as own:
                return self._instantiate_own_class(own, args, kwargs, scope, scope.where(node))
            case OwnCode(node=function, around=around) as own:
                if isinstance(function, Function) and function.decorator_list and not args and not kwargs:
                    kwargs = {**self._arguments_from_decorators(function, around)}
                return self._scan_call_of_own_function(own, args, kwargs, scope)
            case InstalledName(dotted=name):
                pass
            case _ if isinstance(node.func, ast.Attribute):
                owner = base.value.dotted if base is not None and isinstance(base.value, InstalledName) else "?"
                name = f"{owner}.{node.func.attr}"
            case _:
                name = node.func.id if isinstance(node.func, ast.Name) else "?"
        return self._installed(CallSite(name, tuple(args), kwargs, scope.where(node), scope.sure), base, scope)

    def _arguments(self, node: ast.Call, scope: Scope) -> tuple[list[Known | None], dict[str, Known | None]]:
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
        return args, kwargs

    def _scan_call_of_own_function(
        self,
        own: OwnCode,
        args: Sequence[Known | None],
        kwargs: Values,
        caller: Scope,
        *,
        sure: float = 1.0,
        entry: bool = False,
    ) -> Known | None:
        node, around = own.node, own.around
        if id(node) in self._returned or caller.depth > self._folders.limits.depth or isinstance(node, ast.ClassDef):
            return self._returned.get(id(node))
        self._returned[id(node)] = None
        self.followed.setdefault(id(node), node)
        scope = Scope({}, around.module, around, sure=caller.sure * sure, depth=caller.depth + 1)
        spec = node.args
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        named_only = [arg.arg for arg in spec.kwonlyargs]
        bound: dict[str, Known | None] = dict.fromkeys([*names, *named_only])
        defaults: dict[str, ast.expr | None] = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        for name, default in (defaults | dict(zip(named_only, spec.kw_defaults, strict=True))).items():
            found = self.value(default, around)
            bound[name] = found.with_scaled_certainty(_UNDECIDED) if found is not None else None
        if own.bound is not None and names:
            bound[names.pop(0)] = own.bound
        bound.update(zip(names, args, strict=False))
        bound.update({name: value for name, value in kwargs.items() if name in bound})
        for name, value in bound.items():
            if value is not None:
                scope.names[name] = value
                self.recogniser.named(name, value, factor=0.8 * scope.sure, further=entry)
        self._run(node.body, scope)
        self._returned[id(node)] = scope.returned
        return scope.returned

    def _installed(self, site: CallSite, base: Known | None, scope: Scope) -> Known | None:
        if site.dotted in CONFIG_READERS:
            return self._config(site, scope.module)
        if site.last == ADD_ARGUMENT or site.dotted in ("click.option", "click.argument"):
            if (declared := option_name_and_default(site)) is not None:
                self._options[declared[0]] = declared[1]
            return None
        if site.last in _PARSERS:
            return self._parsed(site, scope)
        if site.last.endswith("ArgumentParser"):
            given = site.args[0] if site.args else None
            for each in given.value if given is not None and isinstance(given.value, list) else [given]:
                if each is not None and isinstance(each.value, OwnCode):
                    self._options.update(self._fields(each.value))
        found = result_of(site, base)
        if found is not None:
            if isinstance(found.value, NamedFile):
                self.recogniser.opened(found.value, site.where, site.sure)
            return found
        self.recogniser.call(site)
        for value in (*site.args, *site.kwargs.values()):
            if value is not None and isinstance(value.value, OwnCode):  # a callback
                self._scan_call_of_own_function(value.value, [], {}, scope, sure=0.7)
        return Known(InstalledName(f"{site.dotted}()"), site.where)

    # ---- options and configs

    def _parsed(self, site: CallSite, scope: Scope) -> Known:
        self._resolve_global(scope.module, ADD_ARGUMENT)
        options = {name: value.with_scaled_certainty(0.9) for name, value in self._options.items()}
        for name, value in options.items():
            self.recogniser.named(name, value, factor=0.85 * site.sure)
        values = Known(options, site.where)
        if site.last == "parse_known_args":
            return Known([values, None], site.where)
        return Known([values] * 5, site.where) if site.last.endswith("dataclasses") else values

    def _arguments_from_decorators(self, node: Function, scope: Scope) -> dict[str, Known]:
        for decorator in reversed(node.decorator_list):
            self.value(decorator, scope)
        names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
        return {name: value.with_scaled_certainty(0.9) for name, value in self._options.items() if name in names}

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

    def _instantiate_own_class(
        self, made: OwnCode, args: Sequence[Known | None], kwargs: Values, scope: Scope, where: str
    ) -> Known:
        """Return the fields of a new instance of a user's class. All methods of the class are scanned, `__init__`
        first.
        """
        classes = self._class_and_own_base_classes(made)
        fields = self._fields(made)
        value = Known(fields, where)
        if any(ast.unparse(base).endswith(_MODEL_BASES) for each in classes for base in _base_class_expressions(each)):
            self.recogniser.record_own_model(made.node.name, where, scope.sure)
        methods = {
            node.name: OwnCode(node, each.around, value)
            for each in reversed(classes)
            for node in each.node.body
            if isinstance(node, Function)
        }
        start = methods.pop("__init__", None)
        if start is not None:
            self._scan_call_of_own_function(start, args, kwargs, scope)
        else:
            annotated = (n.target for n in made.node.body if isinstance(n, ast.AnnAssign))
            names = (target.id for target in annotated if isinstance(target, ast.Name))
            for name, each in [*zip(names, args, strict=False), *kwargs.items()]:
                fields.pop(name, None)
                if each is not None:
                    fields[name] = each
            for name, field in [*fields.items()]:
                self.recogniser.named(name, field, factor=0.8 * scope.sure, further=True)
        for name, method in methods.items():
            fields.setdefault(name, Known(method, where))
        return value

    def _fields(self, made: OwnCode) -> dict[str, Known]:
        fields = dict[str, Known]()
        for each in reversed(self._class_and_own_base_classes(made)):
            for node in each.node.body:
                target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
                if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
                    found = self.value(node.value, Scope({}, each.around.module, each.around))
                    if found is not None and not isinstance(found.value, InstalledName):
                        fields[target.id] = found.with_scaled_certainty(0.9)
        return fields

    def _class_and_own_base_classes(self, made: OwnCode) -> list[OwnCode]:
        found = [made]
        for each in found:
            for base in _base_class_expressions(each):
                known = self._name(base.id, each.around, "") if isinstance(base, ast.Name) else None
                own = known.value if known is not None else None
                if isinstance(own, OwnCode) and own.node not in [other.node for other in found]:
                    found.append(own)
        return found

    # ---- modules

    def _scan_import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        where, names = scope.where(node), scope.names
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                module = self._modules.module(parts, scope.module)
                if module is None:
                    bound = InstalledName(alias.name if alias.asname else parts[0])
                    names[alias.asname or parts[0]] = Known(bound, where)
                    self.recogniser.record_framework_of_module(parts[0], where, 0.95)
                elif alias.asname:
                    names[alias.asname] = Known(module, where)
                else:
                    folder = self._folders.module(parts[:1], beside=scope.module.file, package=True)
                    top = self._modules.module(parts[:1], scope.module) or SourceModule(None, parts[0], folder=folder)
                    names[parts[0]] = Known(top, where)
            return
        parts = node.module.split(".") if node.module else []
        module = self._modules.module(parts, scope.module, node.level)
        for alias in node.names:
            name = alias.asname or alias.name
            if module is not None and alias.name == "*":
                (scope.module.stars if names is scope.module.names else []).append(module)
            elif module is not None:
                found = self._member(module, alias.name)
                if found is not None:
                    names[name] = found
            elif node.level:
                self.note(f"{where}: {'.' * node.level}{node.module or ''} is not in the given folders")
            elif self._folders.module(parts, beside=scope.module.file) is None:
                names[name] = Known(InstalledName(f"{node.module}.{alias.name}"), where)
                self.recogniser.record_framework_of_module(parts[0], where, 0.95)

    def _count(self) -> None:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise OutOfBoundsError


def _base_class_expressions(made: OwnCode) -> list[ast.expr]:
    return made.node.bases if isinstance(made.node, ast.ClassDef) else []
