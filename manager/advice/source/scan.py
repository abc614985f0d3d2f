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
    KnownValue,
    NamedFile,
    NotReadError,
    Scope,
    SourceModule,
    UserCode,
    UserFolders,
    compute_arithmetic,
    compute_call_result,
    compute_method_result,
    find_module_file,
    get_item,
    parse_source,
    read_config,
    read_option,
)

Values = Mapping[str, KnownValue | None]

_UNDECIDED = 0.85
_PARSERS = frozenset({"parse_args", "parse_known_args", "parse_args_into_dataclasses"})
_MODEL_BASES = ("Module", "PreTrainedModel", "Model")


class Scanner:
    """Scans one function or script. `results_by_node`: results of the scanned functions. `constants`: values of global
    variables."""

    def __init__(self, folders: UserFolders) -> None:
        self.recogniser = FactRecogniser()
        self.notes: dict[str, None] = {}
        self.results_by_node: dict[ast.AST, KnownValue | None] = {}
        self.constants: dict[tuple[str, str], str] = {}
        self._folders = folders
        self._nodes_left = reading.MOST_NODES
        self._modules: dict[str, SourceModule | None] = {}
        self._scanned: set[ast.stmt] = set()
        self._options: dict[str, KnownValue] = {}

    def add_note(self, why: str) -> None:
        self.notes[why] = None

    def scan_script(self, module: SourceModule, tree: ast.Module) -> None:
        module.names["__name__"] = KnownValue("__main__")
        module.unscanned_statements.clear()
        self._scan_statements(tree.body, Scope(ChainMap(module.names), module))

    def scan_function(self, module: SourceModule, node: Function, arguments: Mapping[str, KnownValue]) -> None:
        scope = Scope(ChainMap(module.names), module)
        given = {**self._arguments_from_decorators(node, scope), **arguments}
        self._scan_called_function(UserCode(node, scope), [], given, scope, is_entry=True)

    # ---- statements

    def _scan_statements(self, body: Sequence[ast.stmt], scope: Scope, factor: float = 1.0) -> None:
        before, scope.sure = scope.sure, scope.sure * factor
        for node in body:
            self._count_node()
            self._scan_statement(node, scope)
            if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
                break
        scope.sure = before

    def _scan_statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Return(value=value):
                found = self.evaluate(value, scope)
                scope.returned = scope.returned or found
            case ast.Assign(targets=targets, value=value):
                found = self.evaluate(value, scope)
                for target in targets:
                    self._bind_target(target, found, scope)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._bind_target(target, self.evaluate(value, scope), scope)
            case ast.If(test=test, body=body, orelse=orelse):
                decided = self.evaluate(test, scope)
                if decided is not None and decided.is_constant and decided.sure > 0.7:
                    self._scan_statements(body if decided.value else orelse, scope)
                else:
                    self._scan_statements(body, scope, _UNDECIDED)
                    self._scan_statements(orelse, scope, _UNDECIDED)
            case ast.For() | ast.AsyncFor():
                self._scan_loop(node, scope)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for each in items:
                    entered = self.evaluate(each.context_expr, scope)
                    if each.optional_vars is not None:
                        self._bind_target(each.optional_vars, entered, scope)
                self._scan_statements(body, scope)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                scope.names[name] = KnownValue(UserCode(node, scope))
            case ast.Import() | ast.ImportFrom():
                self._scan_import(node, scope)
            case _:
                self._scan_children(node, scope)

    def _scan_children(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.expr():
                    self.evaluate(child, scope)
                case ast.stmt():
                    self._scan_statements([child], scope)
                case ast.ExceptHandler(body=body) | ast.match_case(body=body):
                    self._scan_statements(body, scope, 0.5)
                case ast.comprehension():
                    self._scan_children(child, scope)

    def _scan_loop(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        iterated = self.evaluate(node.iter, scope)
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        self._bind_target(node.target, None, scope)
        if iterated is not None and isinstance(iterated.value, range | list):
            self.recogniser.record_loop(name, KnownValue(len(iterated.value), iterated.sure * scope.sure))
            first = iterated.value[0] if isinstance(iterated.value, list) and iterated.value else None
            if name and first is not None:  # `_bind_target` would record the loop variable as a setting
                scope.names[name] = first.with_certainty_factor(0.7)
        self._scan_statements(node.body, scope)
        self._scan_statements(node.orelse, scope)

    def _bind_target(self, target: ast.expr, value: KnownValue | None, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                self._set_value(scope.names, name, value, scope)
            case ast.Attribute(value=base) | ast.Subscript(value=base):
                owner = self.evaluate(base, scope)
                key = (
                    self.evaluate(target.slice, scope) if isinstance(target, ast.Subscript) else KnownValue(target.attr)
                )
                if owner is not None and isinstance(owner.value, dict) and key is not None and key.is_constant:
                    self._set_value(owner.value, str(key.value), value, scope)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = value.value if value is not None and isinstance(value.value, list) else []
                for place, each in enumerate(targets):
                    inner = each.value if isinstance(each, ast.Starred) else each
                    self._bind_target(inner, values[place] if len(values) == len(targets) else None, scope)

    def _set_value(
        self, names: MutableMapping[str, KnownValue], name: str, value: KnownValue | None, scope: Scope
    ) -> None:
        if value is None:
            names.pop(name, None)
            return
        names[name] = value
        if value.is_constant:
            self.recogniser.record_named_value(name, value, factor=0.75 * scope.sure)

    def _scan_import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
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
                module = self._read_module(find_module_file(base.split(".")[:-1], places))
                scope.module.star_imports += [module] if module is not None else []
            elif (known := self._resolve_import(name) if base else KnownValue(name)) is not None:
                scope.names[bound] = known
            if self._find_user_module(name)[0] is None:
                self.recogniser.record_framework_of_module(name.dotted.partition(".")[0], 0.95)

    # ---- names

    def _evaluate_global(self, module: SourceModule, name: str) -> KnownValue | None:
        """Scan the statements that bind a global variable, and return the value of the variable."""
        for node in module.unscanned_statements.pop(name, ()):
            if node not in self._scanned:
                self._scanned.add(node)
                self._scan_statements([node], Scope(ChainMap(module.names), module, sure=0.9))
        found = module.names.get(name)
        if found is None and name != "*":
            self._evaluate_global(module, "*")
            stars, module.star_imports = module.star_imports, []  # circular imports would cause endless recursion
            found = next((known for star in stars if (known := self._evaluate_global(star, name)) is not None), None)
            module.star_imports = stars
        elif found is not None and found.is_constant and not name.startswith("__"):
            self.constants.setdefault((module.shown, name), repr(found.value))
        return found

    def _find_user_module(self, name: ImportedName) -> tuple[Path | None, list[str]]:
        """Split a name after its longest prefix that is a user's module. Return the module's file and the rest."""
        parts = name.dotted.split(".")
        for count in range(len(parts), 0, -1):
            if file := find_module_file(parts[:count], name.places):
                return file, parts[count:]
        return None, parts

    def _resolve_import(self, name: ImportedName, sure: float = 0.95) -> KnownValue | None:
        """Return the value of a name from the user's modules. Return any other imported name unchanged."""
        file, rest = self._find_user_module(name)
        if file is None or not rest:
            return KnownValue(name, sure)
        module = self._read_module(file)
        found = self._evaluate_global(module, rest[0]) if module is not None else None
        for part in rest[1:]:
            found = self._evaluate_attribute(found, part)
        return found

    def _read_module(self, path: Path | None) -> SourceModule | None:
        if path is None:
            return None
        real = os.path.realpath(path)
        if real not in self._modules:
            self._modules[real], shown = None, self._folders.display_name(path)
            try:
                self._modules[real] = SourceModule(path, shown, parse_source(self._folders.read(path), shown))
            except NotReadError as error:
                self.add_note(str(error))
        return self._modules[real]

    # ---- expressions

    def evaluate(self, node: ast.expr | None, scope: Scope) -> KnownValue | None:
        if node is None:
            return None
        self._count_node()
        match node:
            case ast.Constant(value=None | str() | int() | float() as value):
                return KnownValue(value)
            case ast.Name(id=name):
                found = scope.names.get(name)
                return found if found is not None else self._evaluate_global(scope.module, name)
            case ast.Attribute(value=base, attr=name):
                return self._evaluate_attribute(self.evaluate(base, scope), name)
            case ast.Call():
                return self._evaluate_call(node, scope)
            case ast.JoinedStr(values=parts):
                return self._evaluate_fstring(parts, scope)
            case ast.BinOp(left=left, op=op, right=right):
                return compute_arithmetic(op, self.evaluate(left, scope), self.evaluate(right, scope))
            case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
                found = self.evaluate(operand, scope)
                if found is not None and found.is_constant and isinstance(op, ast.Not):
                    return KnownValue(not found.value, found.sure)
                is_number = found is not None and isinstance(found.value, int | float)
                return KnownValue(-found.value, found.sure) if found is not None and is_number else None
            case ast.Compare(
                left=left, ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() as op], comparators=[right]
            ):
                a, b = self.evaluate(left, scope), self.evaluate(right, scope)
                if a is None or b is None or not (a.is_constant and b.is_constant):
                    return None
                return KnownValue((a.value == b.value) == isinstance(op, ast.Eq | ast.Is), min(a.sure, b.sure))
            case ast.Subscript(value=base, slice=index):
                return get_item(self.evaluate(base, scope), self.evaluate(index, scope))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return KnownValue([self.evaluate(element, scope) for element in elements])
            case ast.Dict(keys=keys, values=values):
                pairs = [(self.evaluate(k, scope), self.evaluate(v, scope)) for k, v in zip(keys, values, strict=True)]
                return KnownValue({str(k.value): v for k, v in pairs if k and k.is_constant and v is not None})
            case ast.Await(value=inner) | ast.Starred(value=inner):
                return self.evaluate(inner, scope)
        self._scan_children(node, scope)
        return None

    def _evaluate_attribute(self, base: KnownValue | None, name: str) -> KnownValue | None:
        match base.value if base is not None else None:
            case ImportedName(dotted=dotted, places=places) if base is not None:
                return self._resolve_import(ImportedName(f"{dotted}.{name}", places), base.sure)
            case dict() as named:
                return named.get(name)
            case UserCode(node=ast.ClassDef()) as made:
                return self._class_fields(made).get(name)
            case str() as path if base is not None and name in ("parent", "name", "stem"):
                return KnownValue(str(getattr(Path(path), name)), base.sure)
        return None

    def _evaluate_fstring(self, parts: list[ast.expr], scope: Scope) -> KnownValue | None:
        found = [self.evaluate(part.value if isinstance(part, ast.FormattedValue) else part, scope) for part in parts]
        known = [each for each in found if each is not None and each.is_constant]
        text = "".join(str(each.value) for each in known)
        if len(known) < len(found) or len(text) > LONGEST_TEXT:
            return None
        return KnownValue(text, min((each.sure for each in known), default=0.95))

    def _count_node(self) -> None:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            most = f"{reading.MOST_NODES:,}"
            raise NotReadError(f"the source has more than {most} expressions; only the first of them were read")

    # ---- calls

    def _evaluate_call(self, node: ast.Call, scope: Scope) -> KnownValue | None:
        base: KnownValue | None = None
        if isinstance(node.func, ast.Attribute):
            base = self.evaluate(node.func.value, scope)
            target = self._evaluate_attribute(base, node.func.attr)
        else:
            target = self.evaluate(node.func, scope)
        args, kwargs = list[KnownValue | None](), dict[str, KnownValue | None]()
        for arg in node.args:
            found = self.evaluate(arg, scope)
            if not isinstance(arg, ast.Starred):
                args.append(found)
            elif found is not None and isinstance(found.value, list):
                args += found.value
        for keyword in node.keywords:
            found = self.evaluate(keyword.value, scope)
            if keyword.arg is not None:
                kwargs[keyword.arg] = found
            elif found is not None and isinstance(found.value, dict):
                kwargs.update(found.value)
        match target.value if target is not None else None:
            case UserCode(node=ast.ClassDef()) as own:
                return self._create_instance(own, args, kwargs, scope)
            case UserCode(node=function, defining_scope=around) as own:
                if isinstance(function, Function) and function.decorator_list and not args and not kwargs:
                    kwargs = {**self._arguments_from_decorators(function, around)}
                return self._scan_called_function(own, args, kwargs, scope)
            case ImportedName(dotted=name):
                pass
            case _ if isinstance(node.func, ast.Attribute):
                owner = base.value.dotted if base is not None and isinstance(base.value, ImportedName) else "?"
                name = f"{owner}.{node.func.attr}"
            case _:
                name = node.func.id if isinstance(node.func, ast.Name) else "?"
        return self._handle_installed_call(
            CallSite(name, tuple(args), kwargs, scope.location_of(node), scope.sure), base, scope
        )

    def _scan_called_function(
        self,
        own: UserCode,
        args: Sequence[KnownValue | None],
        kwargs: Values,
        caller: Scope,
        *,
        sure: float = 1.0,
        is_entry: bool = False,
    ) -> KnownValue | None:
        """Scan a function of the user at its first call, and return its result."""
        node, around = own.node, own.defining_scope
        if node in self.results_by_node or caller.depth > reading.DEEPEST_CALLS or isinstance(node, ast.ClassDef):
            return self.results_by_node.get(node)
        self.results_by_node[node] = None
        enclosing = [names for names in around.names.maps if names is not around.module.names]
        scope = Scope(ChainMap({}, *enclosing), around.module, caller.sure * sure, caller.depth + 1)
        spec = node.args
        names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
        named_only = [arg.arg for arg in spec.kwonlyargs]
        bound: dict[str, KnownValue | None] = dict.fromkeys([*names, *named_only])
        defaults: dict[str, ast.expr | None] = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        for name, default in (defaults | dict(zip(named_only, spec.kw_defaults, strict=True))).items():
            found = self.evaluate(default, around)
            bound[name] = found.with_certainty_factor(_UNDECIDED) if found is not None else None
        if own.bound_instance is not None and names:
            bound[names.pop(0)] = own.bound_instance
        bound.update(zip(names, args, strict=False))
        bound.update({name: value for name, value in kwargs.items() if name in bound})
        for name, value in bound.items():
            if value is not None:
                scope.names[name] = value
                self.recogniser.record_named_value(name, value, factor=0.8 * scope.sure, records_other_names=is_entry)
        self._scan_statements(node.body, scope)
        self.results_by_node[node] = scope.returned
        return scope.returned

    def _handle_installed_call(self, site: CallSite, base: KnownValue | None, scope: Scope) -> KnownValue | None:
        if site.dotted in CONFIG_READERS:
            return self._read_config(site, scope.module)
        if site.last == ADD_ARGUMENT or site.dotted in ("click.option", "click.argument"):
            self._options.update(read_option(site))
            return None
        if site.last in _PARSERS:
            return self._return_parsed_options(site, scope)
        if site.last.endswith("ArgumentParser"):
            given = site.args[0] if site.args else None
            for each in given.value if given is not None and isinstance(given.value, list) else [given]:
                if each is not None and isinstance(each.value, UserCode):
                    self._options.update(self._class_fields(each.value))
        found = compute_method_result(site, base) or compute_call_result(site)
        if found is not None:
            if isinstance(found.value, NamedFile):
                self.recogniser.record_opened_file(found.value, site.sure)
            return found
        self.recogniser.record_call(site)
        for value in (*site.args, *site.kwargs.values()):
            if value is not None and isinstance(value.value, UserCode):  # the argument is a callback
                self._scan_called_function(value.value, [], {}, scope, sure=0.7)
        return KnownValue(ImportedName(f"{site.dotted}()"))

    # ---- options and configs

    def _return_parsed_options(self, site: CallSite, scope: Scope) -> KnownValue:
        self._evaluate_global(scope.module, ADD_ARGUMENT)
        options = {name: value.with_certainty_factor(0.9) for name, value in self._options.items()}
        for name, value in options.items():
            self.recogniser.record_named_value(name, value, factor=0.85 * site.sure)
        values = KnownValue(options)
        if site.last == "parse_args":
            return values
        return KnownValue([values] * 5 if site.last.endswith("dataclasses") else [values, None])

    def _arguments_from_decorators(self, node: Function, scope: Scope) -> dict[str, KnownValue]:
        for decorator in reversed(node.decorator_list):
            self.evaluate(decorator, scope)
        names = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
        return {name: value.with_certainty_factor(0.9) for name, value in self._options.items() if name in names}

    def _read_config(self, site: CallSite, module: SourceModule) -> KnownValue | None:
        path = site.args[0].value if site.args and site.args[0] is not None else None
        name = path.path if isinstance(path, NamedFile) else path
        if not isinstance(name, str) or (site.last == "loads" and not isinstance(path, NamedFile)):
            self.add_note(f"{site.where}: the source does not show which file {site.dotted}(...) reads")
            return None
        try:
            return read_config(name, CONFIG_READERS[site.dotted], self._folders, reading_file=module.file)
        except NotReadError as error:
            self.add_note(str(error))
            return None

    # ---- classes

    def _create_instance(
        self, made: UserCode, args: Sequence[KnownValue | None], kwargs: Values, scope: Scope
    ) -> KnownValue:
        """Scan `__init__` of a new instance, and return the fields and methods of the instance."""
        fields = self._class_fields(made)
        value = KnownValue(fields)
        for name, field in fields.items():
            if isinstance(field.value, UserCode):
                fields[name] = KnownValue(dataclasses.replace(field.value, bound_instance=value))
        bases = made.node.bases if isinstance(made.node, ast.ClassDef) else []
        if any(ast.unparse(base).endswith(_MODEL_BASES) for base in bases):
            self.recogniser.record_fact("model", made.node.name, 0.7 * scope.sure)
        if "__init__" in fields:
            self._scan_called_function(fields.pop("__init__").value, args, kwargs, scope)
            return value
        annotated = (n.target for n in made.node.body if isinstance(n, ast.AnnAssign))
        names = (target.id for target in annotated if isinstance(target, ast.Name))
        for name, each in [*zip(names, args, strict=False), *kwargs.items()]:
            fields.pop(name, None)
            if each is not None:
                fields[name] = each
        for name, field in fields.items():
            self.recogniser.record_named_value(name, field, factor=0.8 * scope.sure, records_other_names=True)
        return value

    def _class_fields(self, made: UserCode) -> dict[str, KnownValue]:
        fields, inside = (
            dict[str, KnownValue](),
            Scope(ChainMap({}, *made.defining_scope.names.maps), made.defining_scope.module),
        )
        for base in made.node.bases if isinstance(made.node, ast.ClassDef) else ():
            known = self.evaluate(base, inside)
            if known is not None and isinstance(known.value, UserCode) and known.value.node is not made.node:
                fields |= self._class_fields(known.value)
        for node in made.node.body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    fields[name] = KnownValue(UserCode(node, made.defining_scope))
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=value)
                ):
                    found = self.evaluate(value, inside)
                    if found is not None and not isinstance(found.value, ImportedName):
                        fields[name] = found.with_certainty_factor(0.9)
        return fields
