from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from cli.command_line import Stoker, write_commands

from stoker.config import parse_site
from stoker.errors import ConfigError
from stoker.manager.cli import doctor_site, init, surroundings
from stoker.manager.cli.doctor_machine import FindingLevel
from stoker.manager.cli.surroundings import Gpus, HostFacts, ScratchPlace, Slurm
from stoker.manager.factory.batch import BatchSystemError
from stoker.manager.factory.commands import CommandResult
from stoker.site import ProviderKind, ProvisioningName, Site

SINFO = """\
backfill*|up|1-00:00:00|2|4|4000|gpu:a10:1|1|REQUEUE
backfill*|up|1-00:00:00|2|4|3000|gpu:titanx:1|1|REQUEUE
main|up|infinite|2|4|4000|gpu:a10:1(S:0-1),gpu:a100:4,license:1|10|OFF
cpu|up|30:00|12|64+|256000+|(null)|1|REQUEUE
old|down|infinite|1|4|4000|gpu:k80:2|1|REQUEUE
"""
CONFIG = """\
Configuration data as of 2026-11-21T15:51:05
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PreemptExemptTime       = 00:00:00
"""
NO_ACCOUNTING = """\
 You are not running a supported accounting_storage plugin
Only 'accounting_storage/slurmdbd' is supported.
"""
ANSWERS = {
    "sinfo --version": CommandResult(0, "slurm-wlm 22.05.8\n", ""),
    "sinfo": CommandResult(0, SINFO, ""),
    "scontrol": CommandResult(0, CONFIG, ""),
    "sacctmgr": CommandResult(0, "phys-lab\nbio-lab\nphys-lab\n", ""),
}


def answering(**others: CommandResult) -> Callable[[Sequence[str]], CommandResult]:
    def run(words: Sequence[str]) -> CommandResult:
        answers = {**ANSWERS, **others}
        return answers.get(" ".join(words)) or answers[words[0]]

    return run


def around(**more: object) -> HostFacts:
    facts: dict[str, object] = {
        "host": "login1", "user": "ana", "kind": ProviderKind.SLURM, "command": "/usr/bin/sbatch",
        "slurm": surroundings.query_slurm(answering()), "networks": {"lo": "127.0.0.1", "eno1": "10.1.0.5"},
        "reached_at": "10.1.0.5", "home": "/home/ana/.local/state/stoker", "home_shared": True,
    }  # fmt: skip
    return HostFacts(**(facts | more))  # type: ignore[arg-type]


def drafted(*, partition: str = "", **more: object) -> tuple[Site, str]:
    """Return the site file that `stoker init` writes, read and as text."""
    text = init.draft_site_file(around(**more), partition=partition).text
    return parse_site(text, file="site.toml"), text


CONDOR = {"kind": ProviderKind.CONDOR, "slurm": None, "command": "/usr/bin/condor_submit"}


def test_properties_of_slurm_are_read_from_its_commands():
    slurm = surroundings.query_slurm(answering())
    assert (slurm.version, slurm.accounts, slurm.preempts) == ("22.05.8", ("phys-lab", "bio-lab"), True)
    backfill, main, cpu = slurm.partitions
    assert backfill.gpus == (Gpus("a10", 1, 2), Gpus("titanx", 1, 2))
    assert (backfill.nodes, backfill.default, backfill.limit_s) == (4, True, 86400)
    assert backfill.memory_bytes == 3000 * 1024 * 1024
    assert main.gpus == (Gpus("a10", 1, 2), Gpus("a100", 4, 2))
    assert (cpu.cores, cpu.limit_s, cpu.gpus) == (64, 1800, ())
    assert [slurm.is_preemptible(each) for each in slurm.partitions] == [True, False, True]


def test_missing_accounting_preemption_or_answer_is_recognized():
    no_preemption = CommandResult(0, "PreemptType = preempt/none\n", "")
    slurm = surroundings.query_slurm(answering(sacctmgr=CommandResult(1, NO_ACCOUNTING, ""), scontrol=no_preemption))
    assert (slurm.accounts, slurm.preempts) == ((), False)
    assert not any(slurm.is_preemptible(each) for each in slurm.partitions)
    down = "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n"
    assert surroundings.query_slurm(answering(sinfo=CommandResult(1, "", down))).trouble == down.strip()

    def hang(words: Sequence[str]) -> CommandResult:
        raise BatchSystemError(f"{words[0]} has not answered for 15 s")

    assert surroundings.query_slurm(hang).trouble == "sinfo has not answered for 15 s"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("infinite", 0), ("n/a", 0), ("30", 1800), ("30:00", 1800), ("4:00:00", 14400), ("1-00:00:00", 86400),
     ("2-12", 216000), ("1-00:30", 88200)],
)  # fmt: skip
def test_time_limits_of_partitions_are_parsed(text: str, seconds: float):
    assert surroundings.parse_time_limit(text) == seconds


def test_gpus_are_read_with_or_without_a_type():
    assert surroundings.read_gres("gpu:2") == [("", 2)]
    assert surroundings.read_gres("gpu:a100_3g.20gb:4(S:0-1),shard:8") == [("a100_3g.20gb", 4)]
    assert surroundings.read_gres("(null)") == []


def test_site_file_for_slurm_uses_the_idle_gpus():
    site, text = drafted(scratch=(ScratchPlace("/local/ana", 900_000_000_000, False),))
    assert (site.provider.kind, site.provider.partition) == (ProviderKind.SLURM, "backfill")
    assert (site.provider.account, site.provider.gpus, site.provider.walltime_s) == ("phys-lab", "1", 4 * 3600)
    assert site.policy.provisioning is ProvisioningName.DEFAULT
    assert len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 12
    # cores and memory of the smallest node, which has one GPU
    assert (site.provider.cores, site.provider.memory_bytes) == (4, 2 * 10**9)
    assert "# also: bio-lab" in text
    assert "# backfill (preemptible, REQUEUE; " in text
    assert '# scratch = "/local/ana"' in text


GRANTS = """\
PartitionName=backfill AllowGroups=ALL Default=YES DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED
PartitionName=main Default=NO JobDefaults=DefCpuPerGPU=2,DefMemPerGPU=8000 DefMemPerCPU=100 MaxMemPerNode=64000
PartitionName=cpu Default=NO MaxMemPerCPU=1000
"""


def test_requested_cores_and_memory_are_the_share_of_one_gpu():
    slurm = surroundings.query_slurm(answering(**{" ".join(surroundings.PARTITIONS): CommandResult(0, GRANTS, "")}))
    backfill, main, cpu = slurm.partitions
    assert main.pilot_share == (2, 8000 * 1024**2)
    assert cpu.pilot_share == (64, 64 * 1000 * 1024**2)  # Slurm allows less memory per core than the node has
    assert backfill.pilot_share == (4, int(0.9 * 3000 * 1024**2))
    site, _ = drafted(slurm=slurm, partition="main")
    assert (site.provider.cores, site.provider.memory_bytes) == (2, 8 * 10**9)


def test_htcondor_request_is_the_share_of_one_gpu_of_a_machine():
    nodes = tuple(surroundings.parse_condor_nodes("64 257000 4\n16 64000 undefined\n32 128000 2\n"))
    assert nodes[1] == surroundings.CondorNode(16, 64000 * 1024**2)
    site, _ = drafted(**CONDOR, nodes=nodes)
    assert (site.provider.cores, site.provider.memory_bytes) == (16, 67 * 10**9)
    site, unknown = drafted(**CONDOR)
    assert (site.provider.cores, site.provider.memory_bytes) == (4, 16 * 10**9)
    assert "the machines are not known; change it" in unknown


def test_named_partition_is_used_or_refused():
    site, _ = drafted(partition="cpu")
    assert (site.provider.partition, site.provider.cores, site.provider.gpus) == ("cpu", 64, "")
    assert site.provider.walltime_s == 1800
    with pytest.raises(ConfigError, match="there is no partition gpu; known partitions: backfill, main, cpu"):
        drafted(partition="gpu")


def test_init_chooses_the_fast_network_interface():
    site, text = drafted(networks={"eno1": "10.1.0.5", "ib0": "10.4.0.2"})
    assert site.session.interface == "ib0"
    assert "# 10.4.0.2; also: eno1 10.1.0.5" in text


@pytest.mark.parametrize("kind", [kind for kind in ProviderKind if kind is not ProviderKind.SLURM])
def test_init_writes_a_valid_site_file_for_each_batch_system(kind: ProviderKind):
    command = "" if kind is ProviderKind.LOCAL else "/usr/bin/submit"
    site, _ = drafted(kind=kind, slurm=None, command=command, queues=("gpuq", "long"))
    assert site.provider.kind is kind
    assert site.provider.queue == ("gpuq" if kind.value in ("pbs", "lsf", "grid_engine") else "")


def test_init_writes_a_template_file_if_slurm_does_not_answer():
    made = init.draft_site_file(around(slurm=Slurm("22.05.8", trouble="Unable to contact slurm controller")))
    assert parse_site(made.text, file="site.toml").provider.kind is ProviderKind.SLURM
    assert "Unable to contact slurm controller" in made.notes[0]


def test_queues_are_parsed_from_the_output_of_each_batch_system():
    pbs = """\
Queue              Max   Tot Ena Str   Que   Run   Hld   Wat   Trn   Ext Type
---------------- ----- ----- --- --- ----- ----- ----- ----- ----- ----- ----
workq                0     3 yes yes     0     3     0     0     0     0 Exec
gpuq                 0     0 yes  no     0     0     0     0     0     0 Exec
"""
    lsf = """\
QUEUE_NAME      PRIO STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN  SUSP
gpu              30  Open:Active       -    -    -    -     2     0     2     0
night            20  Closed:Inact      -    -    -    -     0     0     0     0
"""
    assert surroundings.read_queues(pbs, ProviderKind.PBS) == ["workq"]
    assert surroundings.read_queues(lsf, ProviderKind.LSF) == ["gpu"]
    assert surroundings.read_queues("all.q\ngpu.q\n", ProviderKind.GRID_ENGINE) == ["all.q", "gpu.q"]


def test_scratch_folders_are_found_from_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine, work, full = tmp_path / "mine", tmp_path / "work", tmp_path / "a file"
    mine.mkdir()
    work.mkdir()
    full.touch()
    for name, place in (
        ("SCRATCH", mine), ("SCRATCHDIR", mine), ("LOCAL_SCRATCH", tmp_path / "nowhere"), ("WORK", work),
    ):  # fmt: skip
        monkeypatch.setenv(name, str(place))
    found = surroundings.find_scratch_places()
    assert [each.path for each in found[:2]] == [str(mine), str(work)]
    assert [each.path for each in found].count(str(mine)) == 1
    assert str(tmp_path / "nowhere") not in [each.path for each in found]
    for each in found[:2]:
        assert each.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.5)
        assert each.shared == surroundings.is_on_shared_file_system(tmp_path)
    monkeypatch.setenv("SCRATCH", str(full))
    assert str(full) not in [each.path for each in surroundings.find_scratch_places()]


def test_init_writes_a_readable_file_and_overwrites_nothing(
    stoker: Stoker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no batch system
    first = stoker.ok("init")
    assert first.output.startswith("wrote site.toml: this machine\n")
    assert parse_site((tmp_path / "site.toml").read_text(), file="site.toml").is_local
    again = stoker("init")
    assert "site.toml already exists; name another file: stoker init --output FILE" in str(again.exception)
    assert stoker("init", "--output", "-").output == (tmp_path / "site.toml").read_text()


def test_invalid_slurm_setting_error_lists_the_valid_values():
    slurm = surroundings.query_slurm(answering())

    def faults(text: str) -> list[str]:
        site = parse_site(f'[provider]\nkind = "slurm"\n{text}', file="s")
        return [text.removeprefix("[provider] ") for text, _ in doctor_site.find_slurm_faults(site, slurm)]

    assert faults('partition = "backfill"\naccount = "bio-lab"\ngpus = "titanx:1"\nwalltime = "1 d"') == []
    assert faults('gpus = "a10:1"') == []  # the default partition
    assert faults('partition = "gpu"') == ["partition gpu is not up; known partitions: backfill, main, cpu"]
    assert faults('account = "chem"') == ["account chem is not yours; your accounts are phys-lab, bio-lab"]
    assert faults('partition = "cpu"\nwalltime = "1 h"') == [
        "walltime 1 h is more than partition cpu allows, 30 min; set walltime to at most that"
    ]
    assert faults('partition = "backfill"\ngpus = "a10:2"') == [
        'no node has gpus = "a10:2" in backfill; they have a10:1 x 2, titanx:1 x 2'
    ]


def test_site_of_another_scheduler_or_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    site = parse_site('[provider]\nkind = "pbs"\n[session]\ninterface = "ib7"', file="s")
    network, scheduler = doctor_site.check_site_file(site)
    assert network.level is scheduler.level is FindingLevel.NEED
    assert "interface 'ib7' is not a network of this host" in network.text
    assert "site local: it is for pbs; this host has no batch system" in scheduler.text


def test_python_installed_below_tmp_prints_a_warning():
    state = Path("/home/ana/.local/state/stoker")
    (found,) = doctor_site.warn_about_folders_in_tmp(Path("/tmp/venv/bin/python"), state)
    assert found.level is FindingLevel.WARN
    assert found.text.startswith("Python is /tmp/venv/bin/python, which jobs do not see if each job has its own /tmp")
    assert not list(doctor_site.warn_about_folders_in_tmp(Path("/tmpfiles/python"), Path("/home/ana")))


def test_probe_requests_one_minute_of_one_block():
    site = parse_site('name = "big"\n[provider]\nkind = "slurm"\nwalltime = "8 h"\n[pilot]\nmax_blocks = 32', file="s")
    probe = doctor_site.make_probe_site(site)
    assert (probe.provider.walltime_s, probe.pilot.max_blocks, probe.pilot.init_blocks) == (60, 1, 1)
    assert probe.policy.provisioning is ProvisioningName.ONCE
    assert msgspec.structs.replace(probe, provider=site.provider, pilot=site.pilot, policy=site.policy) == site


def test_working_htcondor_is_preferred_to_unconfigured_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sinfo = 'echo slurm-wlm 22.05.8; [ "$1" = --version ] || exit 1'
    write_commands(tmp_path, sbatch="exit 1", sinfo=sinfo, condor_submit="exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = surroundings.inspect_host()
    assert (found.kind, found.others[-1]) == (ProviderKind.CONDOR, ProviderKind.SLURM)


@pytest.mark.parametrize(("answer", "kind"), [("exit 1", ProviderKind.LOCAL), ("echo lab", ProviderKind.KUBERNETES)])
def test_kubernetes_is_chosen_only_with_a_configured_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, kind: ProviderKind
):
    write_commands(tmp_path, kubectl=answer)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(surroundings, "_SUBMIT_COMMANDS", surroundings._SUBMIT_COMMANDS[-1:])
    assert surroundings.inspect_host().kind is kind


def test_doctor_reports_a_missing_image_setting(monkeypatch: pytest.MonkeyPatch):
    here = around(kind=ProviderKind.KUBERNETES, command="/usr/bin/kubectl", slurm=None)
    monkeypatch.setattr(doctor_site, "inspect_host", lambda: here)
    site = parse_site(init.draft_site_file(here).text, file="site.toml")
    (said,) = [each for each in doctor_site.check_site_file(site) if "[provider] image" in each.text]
    assert (said.level, said.fix) == (
        FindingLevel.NEED,
        "write the name of your container image, with Stoker installed",
    )


def test_cpu_cluster_request_covers_most_of_a_node():
    cpu = CommandResult(0, "main*|up|infinite|2|2|7800|(null)|1|OFF\n", "")
    slurm = drafted(slurm=surroundings.query_slurm(answering(sinfo=cpu)))
    nodes = (surroundings.CondorNode(4, 6 * 10**9), surroundings.CondorNode(8, 12 * 10**9))
    for (site, text), size in ((slurm, (2, 7 * 10**9)), (drafted(**CONDOR, nodes=nodes), (4, 6 * 10**9))):
        assert site.pilot.devices == "cpu:1", "a device has the memory that a model needs"
        assert (site.provider.cores, site.provider.memory_bytes) == size
        assert "one GPU" not in text
        assert "most of a node; smaller jobs start sooner; the smallest " in text


@pytest.mark.parametrize(("gpus", "line"), [([0, 0], '# gpus = "1"'), ([0, 4], 'gpus = "1"'), ([], 'gpus = "1"')])
def test_gpus_are_requested_if_the_pool_has_gpus(gpus: list[int], line: str):
    nodes = tuple(surroundings.CondorNode(8, 32 * 10**9, each) for each in gpus)
    _, text = drafted(**CONDOR, nodes=nodes)
    assert next(text for text in text.splitlines() if "gpus =" in text).startswith(line)


@pytest.mark.parametrize(
    ("machines", "level", "told"),
    [
        ("4 6000 0 pool.edu\n2 4000 undefined pool.edu\n", None, ""),
        ("4 6000 0 n1.edu\n2 4000 0 n2.edu\n", FindingLevel.NEED, "machines of the pool run jobs as their own users"),
        ("4 6000 0 POOL.edu\n2 4000 0 n2.edu\n", FindingLevel.WARN, "1 of 2 machines of the pool run jobs as their"),
        ("undefined undefined undefined undefined\n4 6000 0 undefined\n", None, ""),
    ],
)
def test_pool_whose_jobs_may_not_read_the_session_is_reported(machines: str, level: FindingLevel | None, told: str):
    nodes = tuple(surroundings.parse_condor_nodes(machines))
    findings = list(doctor_site.check_slot_users(around(**CONDOR, nodes=nodes, user_domain="pool.edu")))
    assert [finding.level for finding in findings] == ([level] if level else [])
    assert told in "".join(finding.text for finding in findings)
    assert all("shared_files = false" in finding.fix for finding in findings)


def test_private_home_prints_a_warning_if_slot_users_run_jobs(tmp_path: Path):
    closed = tmp_path / "home"
    (closed / "venv" / "bin").mkdir(parents=True)
    for folder in (*reversed(closed.parents), closed / "venv", closed / "venv" / "bin"):
        if folder.is_relative_to(tmp_path):
            folder.chmod(0o755)
    closed.chmod(0o700)
    python = closed / "venv" / "bin" / "python"
    said = [finding.text for finding in doctor_site.warn_about_closed_folders(python)]
    assert len(said) <= 1  # no warning if the parent folder cannot be read, because that error is reported first
    assert "is closed to other users; if HTCondor runs jobs as slot users" in said[0]
