"""Expressions of the source to values, as far as the source tells. Nothing is executed: arithmetic on constants apart,
an expression is only read."""

from __future__ import annotations

import ast
import dataclasses
import operator
import os.path
from collections.abc import Callable, Mapping
from typing import Any

from stoker.manager.advice.source.values import (
    FieldBag,
    InstalledName,
    Known,
    OwnClass,
    OwnFunction,
    SourceModule,
)

LONGEST_TEXT = 10_000
LARGEST_NUMBER = 1e18

_NUMBERS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
}


class OutOfBoundsError(Exception):
    """The source is longer than what is looked at."""


@dataclasses.dataclass(slots=True)
class SourceFrame:
    """The names that a piece of source sees: its own, those around it, its module's. `sure` weakens what it says."""

    names: dict[str, Known]
    around: Mapping[str, Known]
    module: SourceModule
    file: str
    sure: float = 1.0
    depth: int = 0

    def where(self, node: ast.AST) -> str:
        """The place of a node, as `file:line`."""
        return f"{self.file}:{getattr(node, 'lineno', 0)}"


class Evaluator:
    """Evaluates expressions; calls and uses of global names are handed to the walker."""

    def __init__(
        self,
        *,
        call: Callable[[ast.Call, SourceFrame], Known | None],
        used: Callable[[SourceModule, str], None],
        field_of_class: Callable[[OwnClass, str, Known | None], Known | None],
        nodes: int,
    ) -> None:
        self._call = call
        self._used = used
        self._field_of_class = field_of_class
        self._nodes_left = nodes

    def count_node(self) -> None:
        """Count one visited node. Raises OutOfBoundsError when there were too many."""
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise OutOfBoundsError

    def value_of(self, node: ast.expr | None, frame: SourceFrame) -> Known | None:
        """What an expression stands for, or None where the source does not tell."""
        if node is None:
            return None
        self.count_node()
        where = frame.where(node)
        match node:
            case ast.Constant(value=value):
                return Known(value, where) if value is None or isinstance(value, str | int | float | bool) else None
            case ast.Name(id=name):
                return self._name(name, frame, where)
            case ast.Attribute(value=base, attr=attr):
                found = self.attribute(self.value_of(base, frame), attr)
                installed = found is not None and isinstance(found.value, InstalledName)
                return Known(found.value, where, found.sure) if found is not None and installed else found
            case ast.Call():
                return self._call(node, frame)
            case ast.JoinedStr(values=parts):
                return self._joined(parts, frame, where)
            case ast.BinOp():
                return self._arithmetic(node, frame, where)
            case ast.UnaryOp():
                return self._unary(node, frame, where)
            case ast.BoolOp(op=op, values=values):
                return self._either(op, [self.value_of(value, frame) for value in values])
            case ast.Compare():
                return self._compared(node, frame, where)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                decided, yes, no = self.value_of(test, frame), self.value_of(body, frame), self.value_of(orelse, frame)
                if decided is not None and decided.constant:
                    return yes if decided.value else no
                return yes.weakened(0.6) if yes is not None else no.weakened(0.5) if no is not None else None
            case ast.Subscript(value=base, slice=index):
                return _item(self.value_of(base, frame), self.value_of(index, frame))
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return Known([self.value_of(element, frame) for element in elements], where)
            case ast.Dict(keys=keys, values=values):
                pairs = [
                    (self.value_of(key, frame), self.value_of(value, frame))
                    for key, value in zip(keys, values, strict=True)
                ]
                fields = {str(key.value): value for key, value in pairs if key and key.constant and value is not None}
                return Known(FieldBag(fields), where)
            case ast.NamedExpr(target=target, value=inner):
                found = self.value_of(inner, frame)
                _bind(target.id, found, frame)
                return found
            case ast.Await(value=inner) | ast.Starred(value=inner):
                return self.value_of(inner, frame)
            case ast.Lambda():
                return None
        self._visit_inside(node, frame)
        return None

    def attribute(self, base: Known | None, attr: str) -> Known | None:
        """What an attribute of a value stands for."""
        if base is None:
            return None
        value = base.value
        match value:
            case InstalledName(dotted=dotted):
                return Known(InstalledName(f"{dotted}.{attr}"), base.where, base.sure)
            case FieldBag(fields=fields, made_by=made_by):
                if attr in fields:
                    return fields[attr]
                return self._field_of_class(made_by, attr, base) if made_by is not None else None
            case SourceModule(names=names):
                self._used(value, attr)
                return names.get(attr)
            case OwnClass():
                return self._field_of_class(value, attr, None)
            case OwnFunction():
                return None
            case str() if attr == "parent":
                return Known(os.path.dirname(value), base.where, base.sure)
            case str() if attr in ("name", "stem"):
                name = os.path.basename(value)
                return Known(name if attr == "name" else os.path.splitext(name)[0], base.where, base.sure)
        return None

    def _name(self, name: str, frame: SourceFrame, where: str) -> Known | None:
        if name in frame.names:
            if frame.names is frame.module.names:
                self._used(frame.module, name)
            return frame.names[name]
        if name in frame.around:
            return frame.around[name]
        if name in frame.module.names:
            self._used(frame.module, name)
            return frame.module.names[name]
        if name == "__file__":
            return Known(str(frame.module.file), where) if frame.module.file is not None else None
        return Known(frame.module.name, where) if name == "__name__" else None

    def _joined(self, parts: list[ast.expr], frame: SourceFrame, where: str) -> Known | None:
        texts, sure = list[str](), 0.95
        for part in parts:
            plain = not isinstance(part, ast.FormattedValue) or (part.format_spec is None and part.conversion == -1)
            found = self.value_of(part.value if isinstance(part, ast.FormattedValue) else part, frame)
            if found is None or not found.constant or not plain:
                texts, sure = [], 0.0
                continue  # the others are still visited for the calls in them
            texts.append(str(found.value))
            sure = min(sure, found.sure)
        text = "".join(texts)
        return Known(text, where, sure) if sure > 0 and len(text) <= LONGEST_TEXT else None

    def _arithmetic(self, node: ast.BinOp, frame: SourceFrame, where: str) -> Known | None:
        left, right = self.value_of(node.left, frame), self.value_of(node.right, frame)
        if left is None or right is None:
            return None
        a, b, sure = left.value, right.value, min(left.sure, right.sure)
        if isinstance(a, str) and isinstance(b, str):
            if isinstance(node.op, ast.Div):  # a path
                return Known(os.path.join(a, b), where, sure)
            both = a + b
            return Known(both, where, sure) if isinstance(node.op, ast.Add) and len(both) <= LONGEST_TEXT else None
        if not (isinstance(a, int | float) and isinstance(b, int | float)) or type(node.op) not in _NUMBERS:
            return None
        if max(abs(a), abs(b)) > LARGEST_NUMBER or (isinstance(node.op, ast.Pow) and abs(b) > 64):
            return None
        try:
            result = _NUMBERS[type(node.op)](a, b)
        except (ArithmeticError, ValueError):
            return None
        return Known(result, where, sure) if isinstance(result, int | float) and abs(result) < LARGEST_NUMBER else None

    def _unary(self, node: ast.UnaryOp, frame: SourceFrame, where: str) -> Known | None:
        found = self.value_of(node.operand, frame)
        if found is None or not found.constant:
            return None
        if isinstance(node.op, ast.Not):
            return Known(not found.value, where, found.sure)
        if isinstance(node.op, ast.USub) and isinstance(found.value, int | float):
            return Known(-found.value, where, found.sure)
        return None

    def _either(self, op: ast.boolop, values: list[Known | None]) -> Known | None:
        """`a or b`: the first that is true; one that is not known may be it, so what follows is less sure."""
        sure = 1.0
        for value in values:
            if value is None:
                sure = 0.6
            elif bool(value.value) == isinstance(op, ast.Or):
                return value.weakened(sure)
        return values[-1] if sure == 1.0 else None

    def _compared(self, node: ast.Compare, frame: SourceFrame, where: str) -> Known | None:
        left = self.value_of(node.left, frame)
        rights = [self.value_of(each, frame) for each in node.comparators]
        right = rights[0]
        if len(rights) > 1 or left is None or right is None or not (left.constant and right.constant):
            return None
        compare = _COMPARED.get(type(node.ops[0]))
        try:
            return Known(bool(compare(left.value, right.value)), where) if compare is not None else None
        except TypeError:
            return None

    def _visit_inside(self, node: ast.AST, frame: SourceFrame) -> None:
        """Evaluate the expressions inside another kind of node, a comprehension say, for the calls in them."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value_of(child, frame)
            elif isinstance(child, ast.comprehension):
                self.value_of(child.iter, frame)


def _bind(name: str, value: Known | None, frame: SourceFrame) -> None:
    if value is None:
        frame.names.pop(name, None)
    else:
        frame.names[name] = value


def _item(base: Known | None, index: Known | None) -> Known | None:
    if base is None or index is None:
        return None
    if isinstance(base.value, FieldBag):
        return base.value.fields.get(str(index.value))
    if isinstance(base.value, list) and type(index.value) is int and -len(base.value) <= index.value < len(base.value):
        found = base.value[index.value]
        return found if isinstance(found, Known) else None
    return None
