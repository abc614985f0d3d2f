"""Settings of sites and options of calls that TaskVine cannot honour, each with its error text."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.contexts.recipe import Awareness, Recipe
from stoker.errors import ConfigError
from stoker.protocol.calls import CallOptions
from stoker.site import AUTO_PROBE, EnvironmentKind, Policy, ProviderKind, ProvisioningName, Site

SUPPORTED_PROVIDERS = (ProviderKind.LOCAL, ProviderKind.SLURM, ProviderKind.CONDOR)


def refuse_unsupported_site(site: Site) -> None:
    _refuse_if_any(list(_list_site_refusals(site)), where=f"site {site.name}: ")


def refuse_unsupported_call(recipe: Recipe, options: CallOptions, *, deadline_s: float = 0.0) -> None:
    found = [*_list_recipe_refusals(recipe), *_list_option_refusals(options)]
    if deadline_s:
        found.append("deadline: TaskVine runs calls in the order of their submission")
    if options.variants:
        found.append("variants: TaskVine does not track which library has which context; name one context")
    _refuse_if_any(found, where=f"{recipe.name}: ")


def _refuse_if_any(found: list[str], *, where: str) -> None:
    if found:
        rest = "; also " + ", ".join(text.partition(":")[0] for text in found[1:]) if found[1:] else ""
        raise ConfigError(
            f'{where}engine = "taskvine" cannot honour {found[0]}{rest} (engine = "stoker" can)',
            key=found[0].partition(":")[0],
        )


def _list_site_refusals(site: Site) -> Iterator[str]:
    provider = site.provider
    if provider.kind not in SUPPORTED_PROVIDERS:
        there = ", ".join(f'"{kind.value}"' for kind in SUPPORTED_PROVIDERS)
        yield f'[provider] kind = "{provider.kind.value}": the TaskVine factory supports only {there}'
    if site.sites:
        yield "sites: a session with TaskVine has one site"
    if provider.nodes > 1:
        yield f"[provider] nodes = {provider.nodes}: a worker is one node; raise [pilot] max_blocks instead"
    if not provider.shared_files:
        yield "[provider] shared_files = false: TaskVine libraries read this environment and write their logs here"
    if site.environment.kind is EnvironmentKind.PACKED:
        yield '[environment] kind = "packed": TaskVine libraries run in this environment'
    if site.pilot.offers_gpus_and_cpus:
        yield f'[pilot] devices = "{site.pilot.devices}": a worker holds libraries on GPUs or on cores, not both'
    if site.pilot.probe != AUTO_PROBE:
        yield f'[pilot] probe = "{site.pilot.probe}": TaskVine workers do not probe devices'
    for setting in ("name", "dispatch", "residency"):
        if (value := getattr(site.policy, setting)) not in ("", Policy().name):
            yield f'[policy] {setting} = "{value}": TaskVine decides where calls run'
    if site.policy.provisioning not in (ProvisioningName.DEFAULT, ProvisioningName.OPPORTUNISTIC):
        yield f'[policy] provisioning = "{site.policy.provisioning.value}": TaskVine sets the number of workers'
    for setting in ("keep_pending", "finish_within_s"):
        if getattr(site.policy, setting) != getattr(Policy(), setting):
            yield f"[policy] {setting.removesuffix('_s')}: TaskVine sets the number of workers"


def _list_recipe_refusals(recipe: Recipe) -> Iterator[str]:
    needs = recipe.needs
    if needs.device_memory_bytes:
        yield "device_memory: TaskVine gives a library whole GPUs and does not track their memory; leave it out"
    if recipe.slots > 1:
        yield f"slots = {recipe.slots}: a library that keeps its context serves one call at a time; leave it out"
    if recipe.awareness is not Awareness.FULL:
        yield f'awareness = "{recipe.awareness.value}": a context stays loaded as long as TaskVine leaves it there'
    if recipe.calls_per_library:
        yield "calls_per_library: TaskVine decides when a library ends; leave it out"
    for option, is_set in (
        ("min_libraries", recipe.limits.least),
        ("max_libraries", recipe.limits.most),
        ("keep_alive", recipe.limits.keep_alive_s is not None),
    ):
        if is_set:
            yield f"{option}: TaskVine decides how many libraries exist, and when each ends; leave it out"
    if strange := [kind for kind in needs.kinds if kind not in ("cpu", "gpu")]:
        yield f'kinds = "{strange[0]}": TaskVine selects GPUs only by number; request them in the site file (gpus)'


def _list_option_refusals(options: CallOptions) -> Iterator[str]:
    for setting in ("latency_s", "ttft_s", "ttft_per_token_s", "tpot_s"):
        if getattr(options.objective, setting):
            yield f"{setting.removesuffix('_s')}: TaskVine runs calls in the order of their submission"
    if options.gang != (1, 1):
        yield f"gang = {options.gang}: TaskVine starts one library per call; devices= in @context gives a library more"
    if options.stream:
        yield (
            "stream: a call that runs in a library sends nothing before its end; with stream=False in @app, or by"
            " stoker.map, the result is the list of values that the function yields"
        )
