"""Contexts that serve each other's calls: the runtimes of a family. This file alone notes which lists which.

A call names the contexts that can serve it, its own first (`CallOptions.variants`). It waits in the queue of its own
context. A library with room whose own queue is empty is asked what it takes of the queues that list its context
(`Dispatch.pull_others`), and so is every library that could serve a call that comes back. So a call whose own context
has no library waits no longer than for the first room in any other that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stoker.manager.core.nouns import Context, Group, Library


def note(context: Context, others: Iterable[Context]) -> None:
    """Calls of a context list these others as well."""
    for other in others:
        if other is not context:
            context.lists[other.recipe.key] = other
            other.listed_by[context.recipe.key] = context


def forget(context: Context) -> None:
    """A context is forgotten: it lists no other, and none lists it."""
    for other in context.lists.values():
        other.listed_by.pop(context.recipe.key, None)
    for other in context.listed_by.values():
        other.lists.pop(context.recipe.key, None)


def serving(group: Group) -> Iterator[Context]:
    """The contexts that can serve calls of a group: their own, then the others in the order in which they name them."""
    yield group.context
    for key in group.options.variants:
        other = group.context.lists.get(key)
        if other is not None:
            yield other


def libraries_for(context: Context) -> Iterator[Library]:
    """The libraries that calls of a context may run in: its own, then those of contexts that its calls list."""
    yield from context.libraries.values()
    for other in context.lists.values():
        yield from other.libraries.values()
