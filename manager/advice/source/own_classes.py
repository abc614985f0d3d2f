"""Classes of the user's own: their fields, methods and bases."""

from __future__ import annotations

import ast
from collections.abc import Callable

from stoker.manager.advice.source.evaluator import Evaluator, SourceFrame
from stoker.manager.advice.source.values import InstalledName, Known, OwnClass, OwnFunction, SourceModule

_MODEL_BASES = ("Module", "PreTrainedModel", "Model")


class OwnClasses:
    """Looks into classes. A class that is its own base is looked into so deep and no deeper."""

    def __init__(self, evaluator: Evaluator, shown: Callable[[SourceModule], str], *, most_depth: int) -> None:
        self._evaluator = evaluator
        self._shown = shown
        self._most_depth = most_depth

    def fields(self, made: OwnClass, *, depth: int = 0) -> dict[str, Known]:
        """The fields that a class's body and its bases' bodies set."""
        fields = dict[str, Known]()
        for base in self._bases(made, depth):
            fields.update(self.fields(base, depth=depth + 1))
        frame = SourceFrame(dict(made.module.names), {}, made.module, self._shown(made.module))
        for node in made.node.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
                found = self._evaluator.value_of(node.value, frame)
                made_by_call = found is not None and isinstance(found.value, InstalledName)
                if found is not None and not made_by_call:
                    fields[target.id] = found.weakened(0.9)
        return fields

    def attribute(self, made: OwnClass, name: str, bound: Known | None) -> Known | None:
        """A method, bound to an instance if there is one, or a field of the class itself."""
        method = self.method(made, name)
        if method is not None:
            return Known(OwnFunction(method.node, method.module, method.around, bound), "")
        return self.fields(made).get(name) if bound is None else None

    def method(self, made: OwnClass, name: str, *, depth: int = 0) -> OwnFunction | None:
        """A method of a class or of its bases, by name."""
        for node in made.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return OwnFunction(node, made.module, {})
        for base in self._bases(made, depth):
            found = self.method(base, name, depth=depth + 1)
            if found is not None:
                return found
        return None

    def is_model(self, made: OwnClass, *, depth: int = 0) -> bool:
        """True for a class that derives from a framework's class of models or layers."""
        if any(ast.unparse(base).endswith(_MODEL_BASES) for base in made.node.bases):
            return True
        return any(self.is_model(base, depth=depth + 1) for base in self._bases(made, depth))

    def _bases(self, made: OwnClass, depth: int) -> list[OwnClass]:
        if depth > self._most_depth:
            return []
        found = [made.module.names.get(base.id) for base in made.node.bases if isinstance(base, ast.Name)]
        return [each.value for each in found if each is not None and isinstance(each.value, OwnClass)]


def annotated(made: OwnClass) -> dict[str, ast.expr]:
    """The annotated fields of a class's body, as a dataclass takes them."""
    return {
        node.target.id: node.annotation
        for node in made.node.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
