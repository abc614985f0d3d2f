"""Statements of the source in the order in which they run: bindings are kept, branches that cannot be decided are both
walked and make what they say less sure, loops are walked once."""

from __future__ import annotations

import ast
from collections import ChainMap
from typing import Protocol

from stoker.manager.advice.source.evaluator import Evaluator, SourceFrame
from stoker.manager.advice.source.recognise import Recogniser
from stoker.manager.advice.source.values import FieldBag, Known, OwnClass, OwnFunction

_UNDECIDED = 0.85
"""What is left of the certainty in a branch that may not be taken."""


class Importer(Protocol):
    """Finds the modules of the user's own."""

    def bind_import(self, node: ast.Import | ast.ImportFrom, frame: SourceFrame) -> None:
        """Bind the names that an import statement binds."""


class Walker:
    """Walks statements. `recogniser` is where facts go; it changes while the text of a module is walked."""

    def __init__(self, evaluator: Evaluator, importer: Importer, recogniser: Recogniser) -> None:
        self._evaluator = evaluator
        self._importer = importer
        self.recogniser = recogniser

    def walk(self, body: list[ast.stmt], frame: SourceFrame) -> Known | None:
        """Walk statements; returns what the first `return` with a known value gives."""
        returned: Known | None = None
        for node in body:
            self._evaluator.count_node()
            found = self._statement(node, frame)
            returned = returned if returned is not None else found
            if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue):
                break
        return returned

    def _statement(self, node: ast.stmt, frame: SourceFrame) -> Known | None:
        value_of = self._evaluator.value_of
        match node:
            case ast.Return(value=value):
                return value_of(value, frame)
            case ast.Expr(value=value):
                value_of(value, frame)
            case ast.Assign(targets=targets, value=value):
                found = value_of(value, frame)
                for target in targets:
                    self.bind(target, found, frame)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self.bind(target, value_of(value, frame), frame)
            case ast.AugAssign(target=target, value=value):
                value_of(value, frame)
                self.bind(target, None, frame)
            case ast.If(test=test, body=body, orelse=orelse):
                return self._branches(value_of(test, frame), body, orelse, frame)
            case (
                ast.For(target=target, iter=iterated, body=body, orelse=orelse)
                | ast.AsyncFor(target=target, iter=iterated, body=body, orelse=orelse)
            ):
                self._enter_loop(target, value_of(iterated, frame), frame)
                return self._in_turn([body, orelse], frame)
            case ast.While(test=test, body=body, orelse=orelse):
                value_of(test, frame)
                return self._in_turn([body, orelse], frame)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    entered = value_of(item.context_expr, frame)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, entered, frame)
                return self.walk(body, frame)
            case (
                ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody)
                | ast.TryStar(body=body, handlers=handlers, orelse=orelse, finalbody=finalbody)
            ):
                returned = self._in_turn([body, orelse], frame)
                for handler in handlers:
                    self._weaker(handler.body, frame, 0.5)
                return returned or self.walk(finalbody, frame)
            case ast.Match(subject=subject, cases=cases):
                value_of(subject, frame)
                for each in cases:
                    self._weaker(each.body, frame, _UNDECIDED)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                inside = frame.names is not frame.module.names
                around = ChainMap(frame.names, dict(frame.around)) if inside else {}
                own = OwnFunction(node, frame.module, around)
                frame.names[name] = Known(own, frame.where(node))
            case ast.ClassDef(name=name):
                frame.names[name] = Known(OwnClass(node, frame.module), frame.where(node))
            case ast.Import() | ast.ImportFrom():
                self._importer.bind_import(node, frame)
        return None

    def bind(self, target: ast.expr, value: Known | None, frame: SourceFrame) -> None:
        """Bind a target of an assignment; what is not known unbinds it."""
        match target:
            case ast.Name(id=name):
                if value is None:
                    frame.names.pop(name, None)
                else:
                    frame.names[name] = value
                    self._name_tells(name, value, frame)
            case ast.Attribute(value=base, attr=attr):
                self._bind_field(base, attr, value, frame)
            case ast.Subscript(value=base, slice=index):
                key = self._evaluator.value_of(index, frame)
                if key is not None and key.constant:
                    self._bind_field(base, str(key.value), value, frame)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                values = value.value if value is not None and isinstance(value.value, list) else []
                for place, each in enumerate(targets):
                    fits = len(values) == len(targets)
                    self.bind(each, values[place] if fits else None, frame)
            case ast.Starred(value=inner):
                self.bind(inner, None, frame)

    def _bind_field(self, base: ast.expr, attr: str, value: Known | None, frame: SourceFrame) -> None:
        owner = self._evaluator.value_of(base, frame)
        if owner is None or not isinstance(owner.value, FieldBag):
            return
        if value is None:
            owner.value.fields.pop(attr, None)
        else:
            owner.value.fields[attr] = value
            self._name_tells(attr, value, frame)

    def _name_tells(self, name: str, value: Known, frame: SourceFrame) -> None:
        if value.constant:
            self.recogniser.named(name, value, factor=0.75 * frame.sure)

    def _enter_loop(self, target: ast.expr, iterated: Known | None, frame: SourceFrame) -> None:
        values = iterated.value if iterated is not None else None
        first: Known | None = None
        if iterated is not None and isinstance(values, range | list):
            times = Known(len(values), iterated.where, iterated.sure * frame.sure)
            name = target.id if isinstance(target, ast.Name) else ""
            self.recogniser.loop(name, times)
            if isinstance(values, list) and values and isinstance(values[0], Known):
                first = values[0].weakened(0.7)
        # A loop's variable is no setting, whatever it is called.
        if isinstance(target, ast.Name):
            frame.names.pop(target.id, None)
            if first is not None:
                frame.names[target.id] = first
        else:
            self.bind(target, None, frame)

    def _branches(
        self, test: Known | None, body: list[ast.stmt], orelse: list[ast.stmt], frame: SourceFrame
    ) -> Known | None:
        if test is not None and test.constant and test.sure > 0.7:
            return self.walk(body if test.value else orelse, frame)
        first = self._weaker(body, frame, _UNDECIDED)
        second = self._weaker(orelse, frame, _UNDECIDED)
        return first or second

    def _in_turn(self, bodies: list[list[ast.stmt]], frame: SourceFrame) -> Known | None:
        found = [self.walk(body, frame) for body in bodies]
        return next((each for each in found if each is not None), None)

    def _weaker(self, body: list[ast.stmt], frame: SourceFrame, factor: float) -> Known | None:
        before = frame.sure
        frame.sure = before * factor
        try:
            return self.walk(body, frame)
        finally:
            frame.sure = before
