"""`stoker init`: write a short site file for this host's batch system, with a reason for each setting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.manager.cli import console
from stoker.manager.cli.surroundings import (
    FAST_NETWORKS,
    IMAGE_PLACEHOLDER,
    CondorNode,
    HostFacts,
    Partition,
    Slurm,
    inspect_host,
)
from stoker.site import ProviderKind
from stoker.units import show_bytes, show_seconds

# ---- the draft of a site file


_WALLTIME_S = 4 * 3600.0
"""Time limit of a job in seconds; shorter jobs start sooner."""
_MOST_BLOCKS = 8
_CORES, _MEMORY_BYTES = 4, 16 * 10**9
"""Cores, and bytes of memory, that a pilot requests per GPU if the sizes of the machines are unknown."""
_CPU_DEVICE_BYTES = 4 * 10**9
"""Memory of a CPU device, enough for a small language model."""
_UNKNOWN_MEMORY_BYTES = 64 * 1024**2
"""Up to this amount, a node's memory counts as unknown, because Slurm reports 1 MiB if no memory is configured."""
_COMMENT_COLUMN = 32
_WITHOUT_QUEUES = (ProviderKind.LOCAL, ProviderKind.CONDOR, ProviderKind.KUBERNETES)


class SiteFileDraft(msgspec.Struct, frozen=True):
    """A site file whose comments explain its settings. `notes`: further remarks to the user."""

    text: str
    headline: str
    notes: tuple[str, ...] = ()


def draft_site_file(around: HostFacts, *, partition: str = "") -> SiteFileDraft:
    """Return a site file for this host. Raises ConfigError for an unknown partition or queue."""
    if partition and around.kind in _WITHOUT_QUEUES:
        here = "no batch system is here" if around.kind is ProviderKind.LOCAL else f"{around.kind.title} has none"
        raise ConfigError(f"--partition {partition}: {here}; leave it out", key="partition")
    match around.kind:
        case ProviderKind.SLURM:
            return _draft_for_slurm(around, around.slurm or Slurm(), partition)
        case ProviderKind.LOCAL:
            return _draft_for_this_machine(around)
        case _:
            return _draft_for_queue(around, partition)


def choose_partition(slurm: Slurm) -> Partition | None:
    """Return the best partition: with GPUs if any, and preemptible if possible, because losing a pilot costs little."""

    def rank_partition(each: Partition) -> tuple[bool, bool, int, bool]:
        return each.gpu_count > 0, slurm.is_preemptible(each), each.gpu_count, each.default

    return max(slurm.partitions, key=rank_partition, default=None)


def _draft_for_slurm(around: HostFacts, slurm: Slurm, named: str) -> SiteFileDraft:
    chosen = next((each for each in slurm.partitions if each.name == named), None) if named else choose_partition(slurm)
    if named and chosen is None:
        there = ", ".join(each.name for each in slurm.partitions) or f"none ({slurm.trouble})"
        raise ConfigError(f"there is no partition {named}; known partitions: {there}", key="partition")
    lines = [*_head_lines(around, chosen.name if chosen else "slurm", f"Slurm {slurm.version}"), 'kind = "slurm"']
    if chosen is None:
        why = f"its partitions could not be listed ({slurm.trouble})" if slurm.trouble else "it shows no partition"
        note = f"Slurm is here, but {why}: write a partition into the file"
        return SiteFileDraft(_join_lines([*lines, '# partition = "NAME"']), "Slurm", (note,))
    others = ", ".join(describe_partition(slurm, each) for each in slurm.partitions if each is not chosen)
    idle = "; uses idle nodes, and preemption costs only running calls" if slurm.is_preemptible(chosen) else ""
    also = f"also: {others}" if others else "the only partition that is up"
    lines.append(_setting_line("partition", chosen.name, f"{describe_partition(slurm, chosen)}{idle}; {also}"))
    if slurm.accounts:
        first, *more = slurm.accounts
        lines.append(_setting_line("account", first, f"also: {', '.join(more)}" if more else "your only account"))
    limit = f"allows {show_seconds(chosen.limit_s)}" if chosen.limit_s else "has no limit"
    walltime = _format_duration(min(_WALLTIME_S, chosen.limit_s or _WALLTIME_S))
    lines.append(_setting_line("walltime", walltime, f"the partition {limit}; shorter jobs start sooner"))
    if chosen.gpus:
        each = ", ".join(dict.fromkeys(str(gpus) for gpus in chosen.gpus))
        kinds = [gpus for gpus in chosen.gpus if gpus.type]
        alone = f'; write "{kinds[0].type}:1" for one kind alone' if kinds else ""
        lines.append(_setting_line("gpus", "1", f"per node; there are {each} nodes{alone}"))
    known = chosen.memory_bytes > _UNKNOWN_MEMORY_BYTES
    has = f"the smallest node has {chosen.cores}, {show_bytes(chosen.memory_bytes)}" if known else ""
    lines += _size_lines(*chosen.pilot_share, has or _GUESS, gpus=bool(chosen.gpus))
    rest, notes = _pilot_and_session_tables(around, cpu=None if chosen.gpus else chosen.pilot_share)
    return SiteFileDraft(_join_lines([*lines, *rest]), f"Slurm, partition {chosen.name}", tuple(notes))


def _draft_for_queue(around: HostFacts, named: str) -> SiteFileDraft:
    kind = around.kind.value
    if named and around.queues and named not in around.queues:
        raise ConfigError(f"there is no queue {named}; known queues: {', '.join(around.queues)}", key="queue")
    queue = named or (around.queues[0] if around.queues else "")
    lines = [*_head_lines(around, kind, around.command), f'kind = "{kind}"']
    if around.kind is ProviderKind.CONDOR:
        lines.append('# requirements = "GPUs_Capability >= 8.0"')
        lines.append(_with_comment("shared_files = true", 'if not shared: false, and [environment] kind = "packed"'))
    elif around.kind is ProviderKind.KUBERNETES:
        lines.append(
            _setting_line("image", IMAGE_PLACEHOLDER, "write the name of your container image, with Stoker installed")
        )
    elif queue:
        others = ", ".join(name for name in around.queues if name != queue)
        lines.append(_setting_line("queue", queue, f"also: {others}" if others else ""))
    lines.append(_setting_line("walltime", _format_duration(_WALLTIME_S), "shorter jobs start sooner"))
    has_gpus = not around.nodes or any(node.gpus for node in around.nodes)
    if has_gpus:
        lines.append(_setting_line("gpus", "1", "per node; omit this line for CPU cores"))
    else:
        lines.append(_with_comment('# gpus = "1"', "no machine of the pool has a GPU"))
    cores, memory, has = _pilot_size(around.nodes)
    lines += _size_lines(cores, memory, has, gpus=has_gpus)
    rest, notes = _pilot_and_session_tables(around, cpu=None if has_gpus else (cores, memory))
    return SiteFileDraft(_join_lines([*lines, *rest]), kind, tuple(notes))


_GUESS = "a guess, because the machines are not known; change it"


def _pilot_size(nodes: Sequence[CondorNode]) -> tuple[int, int, str]:
    """Return a pilot's cores and memory, and a comment: one GPU's part of the smallest machine with GPUs, or else the
    whole smallest machine."""
    able = [node for node in nodes if node.gpus] or list(nodes)
    if not able:
        return _CORES, _MEMORY_BYTES, _GUESS
    cores = min(max(1, node.cores // max(1, node.gpus)) for node in able)
    memory = min(node.memory_bytes // max(1, node.gpus) for node in able)
    smallest = min(able, key=lambda node: (node.memory_bytes, node.cores))
    return cores, memory, f"the smallest machine has {smallest.cores}, {show_bytes(smallest.memory_bytes)}"


def _size_lines(cores: int, memory: int, has: str, *, gpus: bool) -> list[str]:
    part = "the part of one GPU" if gpus else "most of a node; smaller jobs start sooner"
    line = _with_comment(f"cores = {cores}", f"{part}; {has}")
    if memory <= _UNKNOWN_MEMORY_BYTES:
        return [line, _with_comment('# memory = "16 GB"', "Slurm does not know the memory of its nodes")]
    shown = f"{memory // 10**9} GB" if memory >= 10**9 else f"{memory // 10**6} MB"
    return [line, _setting_line("memory", shown, "for loading models and caching their files")]


def _draft_for_this_machine(around: HostFacts) -> SiteFileDraft:
    lines = [
        *_head_lines(around, "local", "no batch system"),
        'kind = "local"',
        "",
        "[pilot]",
        _with_comment('devices = "auto"', 'all GPUs, else one CPU device per core; "gpu+cpu:1"'),
        _with_comment("", 'also offers the spare cores, to contexts with kinds="cpu"'),
    ]
    return SiteFileDraft(
        _join_lines(lines), "this machine", ("no batch system is on PATH: pilots run on this machine",)
    )


def _head_lines(around: HostFacts, name: str, system: str) -> list[str]:
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:40] or "site"
    found = f"# {system} as user {around.user}, found by `stoker init` on {around.host}."
    return [found, f'name = "{safe}"', "", "[provider]"]


def _pilot_and_session_tables(around: HostFacts, *, cpu: tuple[int, int] | None) -> tuple[list[str], list[str]]:
    lines = ["", "[pilot]", _with_comment(f"max_blocks = {_MOST_BLOCKS}", "jobs at once; your share of the cluster")]
    cores, memory = cpu or (0, 0)
    if memory > _UNKNOWN_MEMORY_BYTES and (count := max(1, memory // _CPU_DEVICE_BYTES)) < cores:
        each = f"at least {show_bytes(_CPU_DEVICE_BYTES)} each" if count > 1 else "all of its memory"
        lines.append(_setting_line("devices", f"cpu:{count}", f'CPU devices of a pilot, {each}; "cpu": one per core'))
    local = [each for each in around.scratch if not each.shared]
    shown = ", ".join(f"{each.path} ({show_bytes(each.free_bytes)} free)" for each in around.scratch)
    place, here = local[0].path if local else "$TMPDIR", f"; here: {shown}" if shown else ""
    lines.append(_with_comment(f'# scratch = "{place}"', f"disk of the compute nodes{here}"))
    unseen = f"{around.home} does not look like a shared file system: if compute nodes do not see it"
    notes = [] if around.home_shared else [f"{unseen}, name a folder that they see: stoker up --folder DIR"]
    if not (fast := next((name for name in around.networks if name.startswith(FAST_NETWORKS)), "")):
        return lines, [*notes, f"pilots will reach this host at {around.reached_at}, the address of its host name"]
    known = ", ".join(f"{name} {address}" for name, address in around.networks.items() if name != fast)
    lines += ["", "[session]", _setting_line("interface", fast, f"{around.networks[fast]}; also: {known}")]
    return lines, notes


def describe_partition(slurm: Slurm, each: Partition) -> str:
    facts = [", ".join(dict.fromkeys(str(gpus) for gpus in each.gpus)) or f"{each.nodes} nodes, no GPUs"]
    if slurm.is_preemptible(each):
        facts.insert(0, f"preemptible, {each.preempt}")
    return f"{each.name} ({'; '.join(facts)})"


def _setting_line(setting: str, value: str, comment: str) -> str:
    return _with_comment(f'{setting} = "{value}"', comment)


def _with_comment(text: str, comment: str) -> str:
    return f"{text.ljust(_COMMENT_COLUMN)}# {comment}" if comment else text


def _format_duration(seconds: float) -> str:
    minutes = max(1, int(seconds // 60))
    return f"{minutes // 60} h" if minutes % 60 == 0 else f"{minutes} min"


def _join_lines(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


@click.command(short_help="Write a site file for the batch system of this host.")
@click.option(
    "--output", metavar="FILE", default="site.toml", type=click.Path(path_type=Path), help="[site.toml]; - for stdout"
)
@click.option("--partition", metavar="NAME", default="", help="Use this partition or queue.")
def init(*, output: Path, partition: str) -> None:
    """Find the scheduler, its partitions, accounts and GPUs, and write a site file of a dozen lines for them.

    The command submits no job and overwrites no file. The command prints the file, whose comments explain the settings.
    """
    to_stdout = str(output) == "-"
    if output.exists() and not to_stdout:
        raise ConfigError(f"{output} already exists; name another file: stoker init --output FILE", file=str(output))
    made = draft_site_file(inspect_host(), partition=partition)
    parse_site(made.text, file=str(output))
    if to_stdout:
        console.write_bytes(made.text.encode())
        return
    try:
        output.write_text(made.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}", file=str(output)) from None
    console.lines(render_result(made, output=output))


def render_result(made: SiteFileDraft, *, output: Path) -> list[str]:
    return [
        f"wrote {output}: {made.headline}",
        "",
        *(f"  {line}" for line in made.text.splitlines()),
        *(f"note: {each}" for each in made.notes),
        "",
        f"next: stoker up {output} --dry-run    print the exact submit script",
        f"      stoker doctor {output}          check the site file; --probe submits a one-minute pilot",
        f"      stoker up {output}",
    ]
