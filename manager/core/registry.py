"""Clients, functions, contexts and groups of calls by name, and limits of libraries per context.

What the session knows by name: clients, functions, contexts, and groups of calls. This file alone adds and forgets.

What a client has defined is kept while the client is, an open call needs it, or a library holds it.

How many libraries of a context there may be, and how long an idle one stays: what several programs wish for
together. This file alone writes that into contexts.

Each program that is here is kept its word as far as that can be: the largest `least`, the smallest `most` and the
longest `keep_alive_s` hold, and `most` before `least`. After the last of them has left, what it wished for goes on to
hold until another program names limits; but `least`, which costs devices, only holds for programs that are here.
What a program that has left wished for is remembered while the session knows the program, for it may come back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

import msgspec

from stoker.contexts.recipe import NO_LIMITS, LibraryLimits, Recipe
from stoker.manager.core import queues
from stoker.manager.core.events import AskAdvice, OfContext, OfFunction
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Client, Context, Group
from stoker.manager.core.per_context import Cost
from stoker.manager.core.state import State
from stoker.protocol.calls import CallOptions
from stoker.protocol.ids import ClientId, FunctionKey, RecipeKey
from stoker.protocol.to_pilot import FunctionBlob

# The session remembers the numbers of at most this many clients that it has forgotten, so that calls of theirs that a
# pilot still reports are not taken for calls of a program that is to come back.
KEPT_NUMBERS = 10_000

# So many groups are kept although none of their calls is open: more of the kind may come.
KEPT_GROUPS = 1000
CLIENT_GAP = 100


# ---- clients
def add_observer(state: State, id: ClientId, *, factory: bool) -> Client:
    """A client that submits nothing, or the factory."""
    client = state.clients[id] = Client(id, number=-1, observer=True)
    client.factory = factory
    return client


def add_client(state: State, id: ClientId, number: int) -> Client:
    """A client that submits calls under a number of its own."""
    state.next_client = max(state.next_client, number + 1)
    client = state.clients[id] = state.clients_by_number[number] = Client(id, number=number, observer=False)
    return client


def skip_client_numbers(state: State) -> None:
    """Begin the next clients' numbers at a round one behind those that may have been given away."""
    state.next_client += CLIENT_GAP - state.next_client % CLIENT_GAP


def bring_pilots(state: State, client: Client, most: int) -> None:
    """A client starts blocks by itself; they bring at most `most` pilots (0 = any number)."""
    state.most_pilots[client.id] = most


def forget_observer(state: State, client: Client) -> None:
    """An observer has gone: nothing is kept of it."""
    del state.clients[client.id]


def forget_client(state: State, client: Client) -> None:
    """A client was gone for too long: nothing is kept of it but its number."""
    del state.clients[client.id], state.clients_by_number[client.number]
    state.most_pilots.pop(client.id, None)
    state.departed[client.number] = None
    if len(state.departed) > KEPT_NUMBERS:
        del state.departed[next(iter(state.departed))]


# ---- what they define
def define_function(state: State, client: Client, function: FunctionBlob) -> None:
    """A client names a function in its calls from now on."""
    state.functions.setdefault(function.key, function)
    client.defined.add(function.key)


def define_context(manager: Manager, recipe: Recipe) -> Context:
    """The context of a recipe, known or new."""
    context = manager.state.contexts.get(recipe.key)
    if context is None:
        dispatch = manager.policies.dispatch
        context = Context(recipe, by_deadline=dispatch.by_deadline, by_run_time=dispatch.by_run_time)
        manager.state.contexts[recipe.key] = context
        manager.changed("contexts", recipe.key)
        manager.out.append(AskAdvice(OfContext(RecipeKey(recipe.key)), recipe.name))
    return context


def ask_advice_again(manager: Manager) -> None:
    """The manager is back: questions that nobody has answered are lost, so what was never measured is asked about."""
    state = manager.state
    for context in state.contexts.values():
        if not context.loads:
            manager.out.append(AskAdvice(OfContext(RecipeKey(context.recipe.key)), context.recipe.name))
    for cost in state.costs.values():
        if not cost.runs:
            manager.out.append(AskAdvice(OfFunction(cost.function.key, cost.recipe), cost.function.measured_as))


def group_key(client: Client, function: FunctionBlob, context: Context, options: CallOptions) -> object:
    """What calls of one group have in common."""
    return client.number, function.key, context.recipe.key, options


def group_of(manager: Manager, client: Client, function: FunctionBlob, context: Context, options: CallOptions) -> Group:
    """The group of a client's calls of a function on a context, known or new."""
    state, key = manager.state, group_key(client, function, context, options)
    group = state.groups.get(key)
    if group is None:
        about = function.key, context.recipe.key
        cost = state.costs.get(about)
        if cost is None:
            cost = state.costs[about] = Cost(function, RecipeKey(context.recipe.key))
            manager.out.append(AskAdvice(OfFunction(function.key, cost.recipe), function.measured_as))
        group = state.groups[key] = Group(key, client, context, cost, options)
        queues.note_variants(context, [state.contexts[other] for other in options.variants if other in state.contexts])
    return group


def group_closed(state: State, group: Group) -> None:
    """None of a group's calls is open: it is kept, if there are not too many, since more of the kind may come."""
    if len(state.groups) > KEPT_GROUPS:
        state.groups.pop(group.key, None)


# ---- what is forgotten
def unused_functions(state: State, client: Client, keys: Iterable[FunctionKey]) -> set[FunctionKey]:
    """A client will not name these functions again. Returns those of all such that no client has defined and no open
    call needs. A function with open calls is kept until these have ended and a client says so of another function."""
    client.defined.difference_update(keys)
    state.unused_functions.update(dict.fromkeys(keys))
    defined = set[str]().union(*(each.defined for each in state.clients.values()))
    needed = {group.function.key for group in state.groups.values() if group.open_calls}
    unused = [key for key in state.unused_functions if key not in needed]
    for key in unused:
        del state.unused_functions[key]
    return {key for key in unused if key not in defined}


def forget_functions(state: State, dropped: set[FunctionKey]) -> None:
    """Forget functions, and what is known of them."""
    for key in dropped:
        state.functions.pop(key, None)
    state.groups = {key: group for key, group in state.groups.items() if group.function.key not in dropped}
    state.costs = {key: cost for key, cost in state.costs.items() if key[0] not in dropped}


def forget_groups(state: State) -> None:
    """Forget groups without open calls whose clients are forgotten."""
    for key, group in list(state.groups.items()):
        if not group.open_calls and state.clients.get(group.client.id) is not group.client:
            del state.groups[key]


def forget_unused(manager: Manager) -> bool:
    """Forget functions and contexts that are defined by no client and in no use, and what is known of them alone. True
    if some are kept because they are in use."""
    state = manager.state
    defined = set[str]().union(*(client.defined for client in state.clients.values()))
    functions = defined.union(group.function.key for group in state.groups.values())
    contexts = defined.union(
        *((group.context.recipe.key, *group.options.variants) for group in state.groups.values()),
        (context.recipe.key for context in state.contexts.values() if context.libraries or context.queue.count),
        (
            library.context.recipe.key
            for gone in state.gone_pilots.values()
            for library, *_ in (gone.kept or {}).values()
        ),
    )
    state.functions = {key: function for key, function in state.functions.items() if key in functions}
    dropped = [context for key, context in state.contexts.items() if key not in contexts]
    for context in dropped:
        _forget_context(manager, context)
    state.costs = {
        (function, recipe): cost
        for (function, recipe), cost in state.costs.items()
        if function in state.functions and recipe in state.contexts
    }
    if dropped:
        _forget_objects(state)
    return not defined.issuperset(chain(state.functions, state.contexts))


def _forget_context(manager: Manager, context: Context) -> None:
    state, key = manager.state, context.recipe.key
    del state.contexts[key]
    queues.forget_variants(context)
    manager.dirty.pop(context, None)
    manager.returned.pop(context, None)
    for about in [about for about in state.transfers.snapshots if about[0] == key]:
        del state.transfers.snapshots[about]


def _forget_objects(state: State) -> None:
    transfers = state.transfers
    named = {ref.name for context in state.contexts.values() for ref in context.recipe.objects}
    named.update(each.object.name for forms in transfers.snapshots.values() for each in forms.values())
    for name, object in list(transfers.objects.items()):
        if name not in named and not object.holders and not object.fetches and name not in transfers.needy:
            del transfers.objects[name]


# ---- limits
_HONOURED = frozenset({"min_libraries", "max_libraries", "keep_alive"})


def set_client_limits(manager: Manager, client: Client, context: Context, limits: LibraryLimits) -> bool:
    """A program names limits for a context, instead of those that it named before. True if others hold from now on.
    `NO_LIMITS` is no word on them; but where the policy honours no limits, it takes back what was refused."""
    if limits == NO_LIMITS:
        if not _are_honoured(manager):
            context.said_limits.pop(client.id, None)
        return False
    known = manager.state.clients
    context.said_limits = {id: each for id, each in context.said_limits.items() if id in known} | {client.id: limits}
    return _settle(manager, context)


def recompute_client_limits(manager: Manager, client: Client) -> list[Context]:
    """A program has left, or is back. Returns the contexts for which other limits hold from now on."""
    said_some = [each for each in manager.state.contexts.values() if client.id in each.said_limits]
    return [context for context in said_some if _settle(manager, context)]


def _settle(manager: Manager, context: Context) -> bool:
    if not _are_honoured(manager):
        return False  # calls with limits are refused
    clients = manager.state.clients
    here = [each for id, each in context.said_limits.items() if id in clients and not clients[id].gone]
    limits = combine_limits(here) if here else msgspec.structs.replace(context.limits, least=0)
    if limits == context.limits:
        return False
    context.limits = limits
    return True


def _are_honoured(manager: Manager) -> bool:
    return manager.policies.residency.honours >= _HONOURED


def combine_limits(limits: Collection[LibraryLimits]) -> LibraryLimits:
    """What holds of several."""
    most = min((each.most for each in limits if each.most), default=0)
    least = max((each.least for each in limits), default=0)
    kept = [each.keep_alive_s for each in limits if each.keep_alive_s is not None]
    return LibraryLimits(min(least, most) if most else least, most, max(kept, default=None))
