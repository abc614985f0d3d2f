"""Options of sessions and calls, checked before the client starts or sends anything."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
from parsl.config import Config
from parsl.data_provider.staging import Staging
from parsl.errors import ConfigurationError
from parsl.executors.errors import InvalidResourceSpecification
from parsl.monitoring.radios.base import RadioConfig
from parsl.providers.base import ExecutionProvider
from typeguard import TypeCheckError

from stoker.config_errors import suggest_similar_name
from stoker.contexts.encoder import Family
from stoker.contexts.factory import as_recipe, recipe_of
from stoker.contexts.folders import ProgramFolder
from stoker.contexts.recipe import BARE, Recipe
from stoker.errors import ConfigError, RecipeError
from stoker.protocol.calls import CallOptions, Features, Objective
from stoker.protocol.ids import RecipeKey
from stoker.site import ProvisioningName, Site
from stoker.units import LONGEST_S, MOST_AT_ONCE, MOST_NUMBER, parse_seconds

# ---- `stoker.load` and StokerExecutor


_LOAD_OPTIONS = ("site", "session", "provider", "label", "run_dir", "retries", "working_dir", "drain_s", "progress")
_PARSL_OPTIONS = tuple(
    name for name in inspect.signature(Config).parameters if name not in ("executors", "run_dir", "retries")
)
_STRATEGIES = (None, "simple", "htex_auto_scale", "none")


def check_option(option: str, value: Any, ok: bool, want: str) -> None:
    """Raise ConfigError unless `ok`. `want`: the valid values in words."""
    if not ok:
        raise ConfigError(f"{option}: {value!r:.80} is not {want}", key=option.rpartition(" ")[2])


def check_boolean_option(option: str, value: Any) -> None:
    check_option(option, value, isinstance(value, bool), "True or False")


def check_integer_option(option: str, value: Any, *, least: int, most: float = math.inf) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    check_option(option, value, is_integer and value >= least, f"a whole number of at least {least}")
    check_option(option, value, value <= most, f"at most {most:,}")


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def check_load_arguments(*, run_dir: Any, retries: Any, options: Mapping[str, Any]) -> None:
    unknown = next((name for name in options if name not in _PARSL_OPTIONS), "")
    if unknown:
        accepted = f"it accepts these options of Parsl: {', '.join(_PARSL_OPTIONS)}"
        hint = suggest_similar_name(unknown, (*_LOAD_OPTIONS, *_PARSL_OPTIONS), otherwise=accepted)
        raise ConfigError(f"stoker.load has no option {unknown}; {hint}", key=unknown)
    strategy = options.get("strategy")
    check_option("strategy", strategy, strategy in _STRATEGIES, 'one of "simple", "htex_auto_scale", "none"')
    if "internal_tasks_max_threads" in options:
        check_integer_option("internal_tasks_max_threads", options["internal_tasks_max_threads"], least=1)
    check_option("run_dir", run_dir, _is_path(run_dir), "the path of a folder")
    check_integer_option("retries", retries, least=0)


def create_parsl_config(**options: Any) -> Config:
    try:
        return Config(**options)
    except (TypeCheckError, TypeError, ValueError, ConfigurationError) as error:
        words = re.sub(r'^argument "\w+" ', "", str(error).partition("\n")[0])
        name = next((name for name in options if f'"{name}"' in str(error)), "")
        name = name or next((name for name in options if name.replace("_", " ") in str(error).lower()), "options")
        given = repr(options.get(name))
        raise ConfigError(f"{name}: {given:.80} is refused by parsl.config.Config: {words}", key=name) from None


def check_executor_options(
    *, site: Any, session: Any, provider: Any, label: Any, working_dir: Any, drain_s: Any, progress: Any,
    storage_access: Any, block_error_handler: Any, remote_monitoring_radio: Any,
) -> None:  # fmt: skip
    joins = session is not None
    check_option(
        "session", session, not joins or isinstance(session, str | os.PathLike), "the id or the folder of a session"
    )
    if joins and not os.fspath(session):
        what = "session: '' names no session (is a variable not set?); name a session that `stoker sessions` lists, or"
        raise ConfigError(f"{what} leave session= out to start one here", key="session")
    if joins and (site is not None or provider is not None):
        raise ConfigError(
            "session= joins a session, which has its own sites: leave out site= and provider=, or session="
        )
    is_name = isinstance(label, str) and label != "" and "/" not in label
    check_option("label", label, is_name, "a valid name: write a text without slashes; it also names a folder")
    check_option("working_dir", working_dir, working_dir is None or _is_path(working_dir), "the path of a folder")
    is_number = isinstance(drain_s, int | float) and not isinstance(drain_s, bool)
    check_option("drain_s", drain_s, is_number and 0 <= drain_s <= LONGEST_S, "a number of seconds, 0 or more")
    is_provider = provider is None or isinstance(provider, ExecutionProvider)
    what = "a provider of Parsl; name a batch system in a site file: stoker.load('site.toml')"
    check_option("provider", provider, is_provider, what)
    check_boolean_option("progress", progress)
    stages = () if storage_access is None else storage_access
    is_list = isinstance(stages, Sequence) and all(isinstance(each, Staging) for each in stages)
    check_option("storage_access", storage_access, is_list, "a list of Parsl's staging providers")
    handles = isinstance(block_error_handler, bool) or callable(block_error_handler)
    what = "True, False or a function of (executor, status)"
    check_option("block_error_handler", block_error_handler, handles, what)
    radio = remote_monitoring_radio
    is_radio = radio is None or isinstance(radio, RadioConfig)
    check_option("remote_monitoring_radio", radio, is_radio, "a radio of parsl.monitoring.radios")


def check_local_policy(site: Site) -> None:
    rule = site.policy.provisioning
    if rule not in (ProvisioningName.DEFAULT, ProvisioningName.FIXED):
        raise ConfigError(
            f'site {site.name}: [policy] provisioning = "{rule.value}" has no effect in a program that starts its own'
            " pilots on this machine; leave it out, or use the site with `stoker up`",
            key="provisioning",
        )


KEYS = {
    "context": "the recipe of the context that the call uses",
    "priority": "a whole number; higher runs first (default 0)",
    "timeout_s": 'limit of the run time of a call: seconds, or a text such as "10 min"',
    "deadline_s": "time from submission until the call should end: seconds or a text",
    "late": '"run" (default) runs a call that cannot meet its deadline after other calls; "drop" drops the call',
    "latency_s": "time from submission to the result: seconds or a text (needs a policy that honours it)",
    "ttft_s": "time to first token: seconds or a text (needs a policy that honours it)",
    "ttft_per_token_s": "time to first token per input token, if that is more than ttft_s: seconds or a text",
    "ttft_most_s": "upper limit of ttft_per_token_s times the input tokens: seconds or a text",
    "tpot_s": "time per output token: seconds or a text (needs a policy that honours it)",
    "features": "facts for policies: {'items': 1, 'input_length': 512, 'expected_output': 64, 'kind': 'long'}",
    "variants": "recipes of other contexts that can also run the call, best first (needs a policy that honours it)",
    "gang": "(smallest, largest) number of libraries that run the call together",
    "stream": "True: send each piece as soon as the function yields it",
}


class SpecificationError(ConfigError, InvalidResourceSpecification):  # type: ignore[misc]  # parsl is untyped
    def __str__(self) -> str:
        return str(Exception.__str__(self))


class CallFolder(NamedTuple):
    """The folder in which calls run: the user's `folder`, or else the program's folder `home`."""

    folder: str = ""
    home: ProgramFolder | None = None


ANYWHERE = CallFolder()


class CallRequirements(msgspec.Struct, frozen=True):
    """Parsed call options. `deadline_s`: seconds from submission (0: none). If contexts depend on the input (`family`),
    `recipe` is the longest context until
    `with_context_for` selects one.
    """

    recipe: Recipe = BARE
    options: CallOptions = CallOptions()
    variants: tuple[Recipe, ...] = ()
    features: Features | None = None
    deadline_s: float = 0.0
    takes_context: bool = False
    family: Family | None = None
    by_context_key: dict[str, CallRequirements] = msgspec.field(default_factory=dict)
    """Options for calls of a context family, by the key of the shortest context that fits the input."""

    def with_streaming(self, streams: bool) -> CallRequirements:
        if self.options.stream is streams:
            return self
        return msgspec.structs.replace(self, options=msgspec.structs.replace(self.options, stream=streams))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `Family.count`, which libraries do not need."""
        family = Family(self.family.recipes) if self.family is not None else None
        return CallRequirements, (
            self.recipe, self.options, self.variants, self.features, self.deadline_s, self.takes_context, family
        )  # fmt: skip

    def knows_input_length(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the calls have a context family and the input length is known."""
        if self.family is None:
            return False
        return _declared_input_length(self.features) > 0 or not isinstance(_first_argument(args, kwargs), Future)

    def with_context_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallRequirements:
        """Return the options of a call: the shortest sufficient context, and longer contexts as variants."""
        if self.family is None:
            return self
        recipe, *longer = self.family.serving(find_input_length(self.family, self.features, args, kwargs))
        known = self.by_context_key.get(recipe.key)
        if known is None:
            options = msgspec.structs.replace(self.options, variants=tuple(RecipeKey(each.key) for each in longer))
            chosen = {"recipe": recipe, "variants": tuple(longer), "options": options, "family": None}
            known = self.by_context_key[recipe.key] = msgspec.structs.replace(self, **chosen, by_context_key={})
        return known


def parse_call_specification(specification: Mapping[str, Any], *, takes_context: bool = False) -> CallRequirements:
    unknown = sorted(str(key) for key in specification if key not in KEYS)
    if unknown:
        raise _unknown_key_error(unknown)
    context = specification.get("context")
    family = context if isinstance(context, Family) else None
    if family is not None and specification.get("variants"):
        raise _invalid_value_error(
            "variants", specification["variants"], "allowed with a family, whose contexts are the variants"
        )
    recipe = (
        family.recipes[-1] if family is not None else None if context is None else _parse_recipe("context", context)
    )
    variants = specification.get("variants")
    variants = () if variants is None else variants
    if isinstance(variants, Recipe | str) or not isinstance(variants, Sequence):
        raise _invalid_value_error("variants", variants, "a list of recipes")
    variants = tuple(_parse_recipe("variants", variant) for variant in variants)
    deadline_s, late = _parse_seconds_option(specification, "deadline_s"), specification.get("late", "run")
    if not isinstance(late, str) or late not in ("run", "drop"):
        raise _invalid_value_error("late", late, '"run" or "drop"')
    if late == "drop" and not deadline_s:
        raise _invalid_value_error("late", late, "allowed without a deadline: set a deadline, too")
    streams = specification.get("stream", False)
    if not isinstance(streams, bool):
        raise _invalid_value_error("stream", streams, "True or False")
    return CallRequirements(
        recipe=recipe or BARE,
        variants=variants,
        features=_parse_features(specification.get("features")),
        deadline_s=deadline_s,
        takes_context=takes_context and recipe is not None,
        family=family,
        options=CallOptions(
            priority=_parse_priority(specification.get("priority", 0)),
            objective=_parse_objective(specification, drop_late=late == "drop"),
            stream=streams,
            variants=tuple(RecipeKey(variant.key) for variant in variants),
            gang=_parse_gang(specification.get("gang", (1, 1))),
            limit_s=_parse_seconds_option(specification, "timeout_s"),
        ),
    )


def read_parsl_spec(spec: Any) -> Recipe:
    """Parse `parsl_spec = {'context': [loader, [args], {kwargs}]}` (context paper, Figure 5)."""
    form = "{'context': [loader, [arguments], {keyword arguments}]}"
    if not isinstance(spec, Mapping) or "context" not in spec:
        raise _invalid_value_error("parsl_spec", spec, form)
    context = spec["context"]
    if isinstance(context, Recipe):
        return context
    if not isinstance(context, Sequence) or not 1 <= len(context) <= 3 or not callable(context[0]):
        raise _invalid_value_error("parsl_spec", spec, form)
    loader = context[0]
    args: Any = context[1] if len(context) > 1 else []
    kwargs: Any = context[2] if len(context) > 2 else {}
    if isinstance(args, str) or not isinstance(args, Sequence) or not isinstance(kwargs, Mapping):
        raise _invalid_value_error("parsl_spec", spec, form)
    return recipe_of(loader, tuple(args), dict(kwargs))


def _unknown_key_error(unknown: list[str]) -> SpecificationError:
    hint = suggest_similar_name(unknown[0], KEYS, otherwise="the context declares the devices that a call needs")
    valid = "\n".join(f"  {key:11} {text}" for key, text in KEYS.items())
    what = f"{unknown[0]} is not a key" if len(unknown) == 1 else f"{', '.join(unknown)} are not keys"
    message = f"parsl_resource_specification: {what}; {hint}\nthe keys are\n{valid}"
    return SpecificationError(message, key=unknown[0], invalid_keys=set(unknown))


def _invalid_value_error(name: str, value: Any, want: str, *, key: str = "") -> SpecificationError:
    key = key or name
    return SpecificationError(f"{name}: {value!r:.80} is not {want}", key=key, invalid_keys={key})


def _parse_recipe(key: str, value: Any) -> Recipe:
    try:
        return as_recipe(value)
    except RecipeError as error:
        raise SpecificationError(f"{key}: {error}", key=key, invalid_keys={key}) from None


def _parse_objective(specification: Mapping[str, Any], *, drop_late: bool) -> Objective:
    names = ("latency_s", "ttft_s", "tpot_s", "ttft_per_token_s", "ttft_most_s")
    wanted = Objective(drop_late=drop_late, **{name: _parse_seconds_option(specification, name) for name in names})
    if wanted.ttft_most_s and not wanted.ttft_per_token_s:
        raise _invalid_value_error(
            "ttft_most_s", specification["ttft_most_s"], "allowed without ttft_per_token_s, which it limits"
        )
    return wanted


def _parse_seconds_option(specification: Mapping[str, Any], key: str) -> float:
    value = specification.get(key)
    if value is None:
        return 0.0
    try:
        seconds = parse_seconds(value)
    except (ConfigError, OverflowError) as error:
        raise SpecificationError(f"{key}: {error}", key=key, invalid_keys={key}) from None
    if not seconds:
        raise _invalid_value_error(key, value, "more than 0 s: omit this option for no limit")
    if seconds > LONGEST_S:
        raise _invalid_value_error(key, value, 'a time within the supported range: write for example "10 min"')
    return seconds


def _parse_priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MOST_NUMBER:
        raise _invalid_value_error("priority", value, f"a whole number between {-MOST_NUMBER:,} and {MOST_NUMBER:,}")
    return value


def _parse_gang(value: Any) -> tuple[int, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = (value, value)
    match value:
        case (int() as least, int() as most) if 1 <= least <= most <= MOST_AT_ONCE:
            return int(least), int(most)
    raise _invalid_value_error("gang", value, f"a number of devices or (smallest, largest), from 1 to {MOST_AT_ONCE:,}")


def _parse_features(value: Any) -> Features | None:
    if value is None:
        return None
    given = msgspec.structs.asdict(value) if isinstance(value, Features) else value
    if not isinstance(given, Mapping):
        raise _invalid_value_error("features", value, f"of this form: {KEYS['features']}")
    for name, part in given.items():
        if (what := _FEATURE_VALUES.get(name)) is None:
            raise _invalid_value_error("features", name, f"a known feature of a call: {', '.join(_FEATURE_VALUES)}")
        if not _is_valid_feature_value(part, what):
            raise _invalid_value_error(f"features: {name}", part, what, key="features")
    return Features(**given)


_WHOLE_NUMBER, _SECONDS = "a whole number, 0 or more", "a number of seconds, 0 or more"
_TEXT = "a text without control characters"
_FEATURE_VALUES = {
    "items": _WHOLE_NUMBER, "input_length": _WHOLE_NUMBER, "expected_output": _WHOLE_NUMBER, "fixed_s": _SECONDS,
    "kind": _TEXT, "shared_s": _SECONDS, "most_output": _WHOLE_NUMBER,
}  # fmt: skip


def _is_valid_feature_value(value: Any, what: str) -> bool:
    if what is _TEXT:
        return isinstance(value, str) and value.isprintable()
    if isinstance(value, bool) or not isinstance(value, int if what is _WHOLE_NUMBER else int | float):
        return False
    return bool(0 <= value <= (MOST_NUMBER if what is _WHOLE_NUMBER else LONGEST_S))


# ---- the input length of a call to a family


def find_input_length(family: Family, features: Features | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    if said := _declared_input_length(features):
        return said
    if family.count is None:
        raise ConfigError(
            "a call to a family needs the length of its input: write family(..., count=function of the first argument)"
            ' or features={"input_length": tokens}',
            key="features",
        )
    return family.count(_first_argument(args, kwargs))


def _declared_input_length(features: Features | None) -> int:
    return features.input_length if features is not None else 0


def _first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)
