"""Register clients, functions, contexts, groups of calls, and limits on the number of a context's libraries.

A definition is kept while a client that has sent it is known, an open call needs it, or a library has loaded it. The
limits of several programs are combined. Limits of a program that has left, except `least`, remain until another program
sets limits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

import msgspec

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits, Recipe
from stoker.manager.core import ending
from stoker.manager.core.events import AskAdvice, OfContext, OfFunction
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import CallGroup, Client, Context
from stoker.manager.core.per_context import FunctionCost
from stoker.manager.core.state import State, forget_oldest
from stoker.protocol.calls import CallOptions
from stoker.protocol.ids import FunctionKey, RecipeKey
from stoker.protocol.to_manager import Submit

KEPT_CLIENT_NUMBERS = 10_000  # Maximum number of remembered removed clients, whose calls do not count as orphans


def forget_client(state: State, client: Client) -> None:
    del state.clients[client.id]
    if client.observer:
        return
    del state.clients_by_number[client.number]
    state.most_pilots.pop(client.id, None)
    state.removed_client_numbers[client.number] = None
    forget_oldest(state.removed_client_numbers, max_records=KEPT_CLIENT_NUMBERS)


def define_context(manager: Manager, recipe: Recipe) -> Context:
    context = manager.state.contexts.get(recipe.key)
    if context is None:
        dispatch = manager.policies.dispatch
        context = Context(recipe, by_deadline=dispatch.by_deadline, by_run_time=dispatch.by_run_time)
        manager.state.contexts[recipe.key] = context
        manager.mark_changed("contexts", recipe.key)
        manager.commands.append(AskAdvice(OfContext(RecipeKey(recipe.key)), recipe.name))
    return context


def repeat_advice_requests(manager: Manager) -> None:
    state = manager.state
    for context in state.contexts.values():
        if not context.loads:
            manager.commands.append(AskAdvice(OfContext(RecipeKey(context.recipe.key)), context.recipe.name))
    for cost in state.costs.values():
        if not cost.runs:
            manager.commands.append(AskAdvice(OfFunction(cost.function.key, cost.recipe), cost.function.timing_key))


def add_group(manager: Manager, client: Client, message: Submit, options: CallOptions) -> CallGroup:
    state = manager.state
    function, context = state.functions[message.function], state.contexts[message.recipe]
    about = function.key, context.recipe.key
    cost = state.costs.get(about)
    if cost is None:
        cost = state.costs[about] = FunctionCost(function, RecipeKey(context.recipe.key))
        manager.commands.append(AskAdvice(OfFunction(function.key, cost.recipe), function.timing_key))
    key = client.number, function.key, context.recipe.key, options
    group = state.groups[key] = CallGroup(key, client, context, cost, options)
    for variant in options.variants:
        other = state.contexts.get(variant, context)
        if other is not context:
            context.variants[variant] = other
            other.variant_of[context.recipe.key] = context
    return group


def forget_functions(manager: Manager, client: Client, keys: Iterable[FunctionKey]) -> None:
    """Remove a client's definitions of functions, and forget the functions that are not used any more."""
    state = manager.state
    client.defined.difference_update(keys)
    state.unused_functions.update(dict.fromkeys(keys))
    defined = set[str]().union(*(each.defined for each in state.clients.values()))
    needed = {group.function.key for group in state.groups.values() if group.open_calls}
    unused = [key for key in state.unused_functions if key not in needed]
    for key in unused:
        del state.unused_functions[key]
    dropped = {key for key in unused if key not in defined}
    if dropped:
        ending.record_runs(manager)
        for key in dropped:
            state.functions.pop(key, None)
        state.groups = {key: group for key, group in state.groups.items() if group.function.key not in dropped}
        state.costs = {key: cost for key, cost in state.costs.items() if key[0] not in dropped}


def forget_unused_definitions(manager: Manager) -> bool:
    """Forget unused groups, functions and contexts. Return True if some are kept although no client defines them."""
    state, clients = manager.state, manager.state.clients
    state.groups = {key: x for key, x in state.groups.items() if x.open_calls or clients.get(x.client.id) is x.client}
    defined = set[str]().union(*(client.defined for client in clients.values()))
    functions = defined.union(group.function.key for group in state.groups.values())
    kept = (
        library for gone in state.gone_pilots.values() for library, *_ in (gone.restorable_libraries or {}).values()
    )
    contexts = defined.union(
        *((group.context.recipe.key, *group.options.variants) for group in state.groups.values()),
        (context.recipe.key for context in state.contexts.values() if context.libraries or context.queue.count),
        (library.context.recipe.key for library in kept),
    )
    state.functions = {key: function for key, function in state.functions.items() if key in functions}
    dropped = [context for key, context in state.contexts.items() if key not in contexts]
    for context in dropped:
        _forget_context(manager, context)
    state.costs = {
        key: cost for key, cost in state.costs.items() if key[0] in state.functions and key[1] in state.contexts
    }
    if dropped:
        _forget_objects(state)
    return not defined.issuperset(chain(state.functions, state.contexts))


def _forget_context(manager: Manager, context: Context) -> None:
    state, key = manager.state, context.recipe.key
    del state.contexts[key]
    for other in context.variants.values():
        other.variant_of.pop(key, None)
    for other in context.variant_of.values():
        other.variants.pop(key, None)
    manager.contexts_to_decide.pop(context, None)
    manager.contexts_to_serve.pop(context, None)
    state.transfers.snapshots.pop(key, None)


def _forget_objects(state: State) -> None:
    transfers = state.transfers
    named = {ref.name for context in state.contexts.values() for ref in transfers.objects_of_recipe(context.recipe)}
    for name, object in list(transfers.objects.items()):
        if name not in named and not object.holders and not object.fetches and name not in transfers.needy:
            del transfers.objects[name]


_LIMIT_OPTIONS = frozenset({"min_libraries", "max_libraries", "keep_alive"})


def set_client_limits(manager: Manager, client: Client, context: Context, limits: LibraryLimits) -> bool:
    """Set the limits of a program for a context. Return True if the combined limits changed."""
    if limits == NO_LIMITS:
        if not _are_limits_honoured(manager):
            context.reported_limits.pop(client.id, None)
        return False
    of_known = {id: each for id, each in context.reported_limits.items() if id in manager.state.clients}
    context.reported_limits = of_known | {client.id: limits}
    return _update_limits(manager, context)


def recompute_client_limits(manager: Manager, client: Client) -> list[Context]:
    """Combine all limits again after a program left or returned. Return the contexts whose limits changed."""
    contexts = manager.state.contexts.values()
    return [each for each in contexts if client.id in each.reported_limits and _update_limits(manager, each)]


def _update_limits(manager: Manager, context: Context) -> bool:
    if not _are_limits_honoured(manager):
        return False  # the manager refuses calls that set limits
    clients, before = manager.state.clients, context.limits
    here = [each for id, each in context.reported_limits.items() if id in clients and not clients[id].gone]
    context.limits = combine_limits(here) if here else msgspec.structs.replace(before, least=0)
    return context.limits != before


def _are_limits_honoured(manager: Manager) -> bool:
    return manager.policies.residency.honours >= _LIMIT_OPTIONS


def combine_limits(limits: Collection[LibraryLimits]) -> LibraryLimits:
    """Return the largest `least`, the smallest `most`, and the longest `keep_alive_s`. `least` is at most `most`."""
    most = min((each.most for each in limits if each.most), default=0)
    least = max((each.least for each in limits), default=0)
    kept = [each.keep_alive_s for each in limits if each.keep_alive_s is not None]
    return LibraryLimits(min(least, most) if most else least, most, max(kept, default=None))
