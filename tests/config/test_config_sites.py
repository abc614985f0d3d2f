"""Shipped site files load, and each error is one line with file, line, setting and advice."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config import (
    Engine,
    ProviderKind,
    Site,
    load_site,
    load_sites,
    parse_site,
    shipped_site_names,
)
from stoker.errors import ConfigError, UnitError
from stoker.manager.live.helper_processes import create_source
from stoker.units import parse_rate, show_seconds

SITES = sorted((Path(__file__).parents[2] / "site-configs").glob("*.toml"))


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_shipped_site_loads_and_has_the_name_of_its_file(path: Path) -> None:
    site = load_site(path)
    assert site.name == path.stem
    assert site.engine is (Engine.TASKVINE if path.stem == "taskvine" else Engine.STOKER)


def test_mixed_site_is_two_sites_in_one_session() -> None:
    mixed, other = load_sites(next(path for path in SITES if path.stem == "mixed"))
    assert (mixed.name, mixed.is_local, mixed.session.interface) == ("mixed", True, "auto")
    assert (other.name, other.provider.kind) == ("slurm-preemptible", ProviderKind.SLURM)


def test_default_site_is_this_machine_with_one_pilot() -> None:
    site = load_site()
    assert site == Site.default()
    assert (site.pilot.devices, site.pilot.init_blocks, site.pilot.max_blocks) == ("auto", 1, 1)


def test_units_of_settings_are_parsed() -> None:
    site = parse_site('[pilot]\ncache_size = "1.5 TB"\n[session]\nheartbeat = "500 ms"\nlease = "1h30m"', file="a")
    assert site.pilot.cache_bytes == 1_500_000_000_000
    assert site.session.heartbeat_s == 0.5
    assert site.session.lease_s == 5400


FAULTS = {
    '[provider]\n\nkynd = "local"': "line 3: [provider] kynd is not a setting; did you mean kind?",
    '[pilot]\nheartbeat = "5 s"': "line 2: [pilot] heartbeat is not a setting; did you mean heartbeat in [session]?",
    '[pilot]\n"two words" = 1': "line 2: [pilot] two words is not a setting; there are devices, cache_size, scratch,"
    " init_blocks, min_blocks, max_blocks, probe, probe_every, cache_age, gpu_cores",
    "max_blocks = 3": "line 1: max_blocks is not a setting; did you mean max_blocks in [pilot]?",
    "\nqqq = 1": "line 2: qqq is not a setting; there are name, engine, sites, provider, pilot, session, policy,"
    " environment, advice",
    '[pilot]\ncache_size = "4 gigs"': "line 2: [pilot] cache_size: '4 gigs' is not a size; write a number and one of"
    " B, kB, MB, GB, TB, KiB, MiB, GiB, TiB",
    '[provider]\nkind = "slurm"\nmemory = 16': "line 3: [provider] memory: 16 is not a size: the unit of 16 is missing;"
    ' write "16 GB" or "16 MB"',
    "[pilot]\ncache_size = 20000000000": "line 2: [pilot] cache_size: 20000000000 is not a size: the unit of"
    ' 20000000000 is missing; write "20000000000 B" (if bytes are meant: 20.0 GB)',
    '[session]\nlease = "soon"': "line 2: [session] lease: 'soon' is not a duration; write a number and one of ms, s,"
    " m, min, h, d (as in 1h30m)",
    '[session]\nlease = "1 s"': "line 2: [session] lease = 1 s must be at least two heartbeats (5 s each)",
    '[provider]\nkind = "slurm"\nwalltime = 4': "line 3: [provider] walltime: 4 is not a duration: the unit of 4 is"
    ' missing; write "4h" or "4min"',
    '[session]\nlease = "1h30"': "line 2: [session] lease: '1h30' is not a duration: the unit of 30 is missing;"
    ' write "30h" or "30min"',
    '[provider]\nkind = "slrum"': "line 2: [provider] kind = 'slrum' is not available; did you mean 'slurm'?",
    '[provider]\nkind = "slurm"\npartiton = "x"': "line 3: [provider] partiton is not a setting; did you mean"
    " partition?",
    '[provider]\nkind = "condor"\nqos = "x"': "line 3: [provider] qos is a setting for slurm; kind is condor",
    '[provider]\nkind = "slurm"\nwalltime = "20 s"': "line 3: [provider] walltime must be between 1 min and a year",
    "[provider]\nnodes = 2": "line 2: [provider] nodes = 2: a block of local always has one node;"
    " raise max_blocks instead",
    '[session]\nports = "2000-1500"': "line 2: [session] ports = '2000-1500' must be a range between 1024 and 65535,"
    " low-high",
    "[provider]\nkind = 3": "line 2: [provider] kind must be text in quotes, not a whole number",
    '[pilot]\ndevices = "cpu:0"': 'line 2: [pilot] devices: write "auto", "gpu", "cpu", "cpu:N" with N from 1 to'
    ' 9999, or GPUs and spare cores as "gpu+cpu:N"',
    '[pilot]\ndevices = "gpu"\ngpu_cores = 4': "line 3: [pilot] gpu_cores has no effect: it needs devices ="
    ' "gpu+cpu"; with devices = "gpu", the GPUs share all cores; leave it out',
    '[pilot]\ndevices = "gpu+cpu"\ngpu_cores = 0': "line 3: [pilot] gpu_cores must be a whole number of at least 1",
    '[pilot]\ndevices = "gpu+cpu:1"\n[provider]\nkind = "slurm"\ngpus = 2\ncores = 4': "line 3: provider: cores = 4"
    ' leave no core for the CPU devices of "gpu+cpu:1", because [pilot] gpu_cores = 2 reserves cores for each GPU; ask'
    " for at least 5",
    "[pilot]\nmax_blocks = 0": "line 2: [pilot] max_blocks must be a whole number of at least 1",
    "[pilot]\nmax_blocks = 2\nmin_blocks = 3": "line 3: [pilot] min_blocks = 3 is more than max_blocks = 2",
    '[pilot]\nscratch = "here"': "line 2: [pilot] scratch = 'here' must be an absolute path, or start with ~ or $",
    "pilot = 3": "line 1: pilot is a table: write [pilot] on its own line, and its settings below",
    'name = "two words"': "line 1: name: up to 40 letters, digits, dots, dashes and underscores",
    'name = "a"\nname = "b"': "line 2: not TOML: this setting is written twice",
    "name = lab": 'line 1: not TOML: a value is missing or wrong; write text in quotes, as in name = "lab"',
}


@pytest.mark.parametrize("text", FAULTS, ids=lambda text: text.strip().replace("\n", " / ")[:40])
def test_site_error_is_one_line_with_location_and_advice(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_site(text + "\n", file="site.toml")
    assert str(caught.value) == f"site.toml: {FAULTS[text]}"
    assert "\n" not in str(caught.value)
    assert caught.value.file == "site.toml"
    assert f"line {caught.value.line}:" in str(caught.value)


def test_error_line_is_correct_below_multi_line_values() -> None:
    text = 'name = """\n[pilot]\ncache_size = 3\n"""\n'
    with pytest.raises(ConfigError, match="line 1: name"):
        parse_site(text, file="s")
    text = "unknown = [\n  { a = 1 },\n  [2],\n]\n"
    with pytest.raises(ConfigError, match="line 1: unknown is not"):
        parse_site(text, file="s")
    text = "# [pilot]\n[pilot] # ]\n# cache_size = 3\nscratch = '''\ncache_size = [\n'''\ncache_size = 'x'\n"
    with pytest.raises(ConfigError, match=r"line 7: \[pilot\] cache_size"):
        parse_site(text, file="s")


def test_numeric_setting_may_be_quoted() -> None:
    text = '[provider]\nkind = "slurm"\n{}\n[pilot]\n{}\n'
    quoted = parse_site(text.format('gpus = "2"\nnodes = "3"\ncores = " 8"', 'max_blocks = "4"'), file="s")
    plain = parse_site(text.format("gpus = 2\nnodes = 3\ncores = 8", "max_blocks = 4"), file="s")
    assert quoted == plain
    assert (plain.provider.gpu_count, plain.provider.nodes, plain.pilot.max_blocks) == (2, 3, 4)
    assert parse_site(text.format("gpus = 0", ""), file="s").provider.gpus == ""


def test_shipped_site_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_site("workstation").pilot.devices == "gpu"
    assert [site.name for site in load_sites("local")] == ["local"]
    assert "workstation" in shipped_site_names()
    with pytest.raises(ConfigError, match=r"^lokal: no such file; did you mean local\?$"):
        load_site("lokal")
    with pytest.raises(ConfigError, match="no such file; shipped sites are condor, "):
        load_site("qqq")
    Path("workstation").write_text('name = "mine"')
    assert load_site("workstation").name == "mine", "a file in the current folder is found first"


def test_missing_site_file_error_suggests_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "local.toml").write_text("")
    with pytest.raises(ConfigError, match=r"locl\.toml: no such file; did you mean .*local\.toml\?$"):
        load_site(tmp_path / "locl.toml")
    with pytest.raises(ConfigError, match=r"zzz: no such file; .* has local\.toml$"):
        load_site(tmp_path / "zzz")
    with pytest.raises(ConfigError, match=r"no such file \(there is no folder"):
        load_site(tmp_path / "no" / "local.toml")


def test_unreadable_site_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_site(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=r"line 1: byte 9 \(0xff\) is not UTF-8 text"):
        load_site(tmp_path / "latin.toml")


def test_config_error_survives_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_site("[pilot]\ncache_size = true", file="site.toml")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.line, again.key) == (str(caught.value), 2, "cache_size")
    assert not isinstance(again, UnitError)


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ([], 1),
        (["--array=0-3"], 4),
        (["--comment=x -a 1,5,7-8"], 4),
        (["--array=0-15:4"], 4),
        (["--array=0-15%3"], 3),
        (["--array=0-9", "--array=0-1"], 2),
        (["--array=nonsense"], 1),
    ],
)
def test_job_array_starts_one_pilot_per_task_and_node(options: list[str], tasks: int) -> None:
    text = f'[provider]\nkind = "slurm"\nnodes = 2\noptions = {options!r}'
    assert parse_site(text, file="s").provider.pilots_per_block == 2 * tasks


@pytest.mark.parametrize(
    ("kind", "option"), [("pbs", "-J 0-3"), ("lsf", '#BSUB -J "name[1-4]"'), ("grid_engine", "-t 1-4")]
)
def test_job_arrays_of_other_batch_systems_are_refused(kind: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"a block of {kind} is not a job array; raise max_blocks instead"):
        parse_site(f"[provider]\nkind = '{kind}'\noptions = ['{option}']", file="s")
    assert parse_site(f"[provider]\nkind = '{kind}'\noptions = ['-P word', '-j y']", file="s")


@pytest.mark.parametrize(
    ("kind", "option", "own"),
    [
        ("slurm", "--chdir=/tmp", "--chdir"),
        ("slurm", "--chd=/tmp", "--chd"),
        ("slurm", "-D /tmp", "-D"),
        ("slurm", "-HJ mine", "-J"),
        ("slurm", "--test-only", "--test-only"),
        ("slurm", "--wait", "--wait"),
        ("slurm", "--clusters=other", "--clusters"),
        ("pbs", "-N mine", "-N"),
        ("pbs", "-Wblock=true", "-W block"),
        ("pbs", "#PBS -z", "-z"),
        ("lsf", "-K", "-K"),
        ("lsf", "-J'mine[1-4]'", "-J"),
        ("lsf", "-oout", "-oo"),
        ("pbs", "-koe", "-k"),
        ("pbs", "-R oe", "-R"),
        ("grid_engine", "-terse", "-terse"),
        ("grid_engine", "-wd /tmp", "-wd"),
        ("grid_engine", "-sync y", "-sync"),
        ("condor", "+Iwd = 3", "Iwd"),
        ("condor", "Output = o", "Output"),
    ],
)
def test_batch_option_that_breaks_job_tracking_is_refused(kind: str, option: str, own: str) -> None:
    text = f'[provider]\nkind = "{kind}"\noptions = ["{option}"]'.replace('"mine"', "'mine'")
    said = rf"line 3: \[provider\] options has .*: {own} is not allowed in a site file: .*; remove it$"
    with pytest.raises(ConfigError, match=said):
        parse_site(text, file="s")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("slurm", ["--array=0-3", "--exclude=n1", "--wait-all-nodes=1", "--cluster-constraint=a", "-d x", "-H"]),
        ("slurm", ["--nice=-5", "--comment='a -J b'", "# -J is not ours", "--open-mode=truncate", "-C a", "-x n1"]),
        ("pbs", ["-j oe", "-W group_list=a", "-l place=excl", "-V", "-P x", "-m n"]),
        ("lsf", ["-Jd words", "-Jdwords", "-env all", "-eptl 10", "-R 'span[hosts=1]'", "-ext x", "-W 10"]),
        ("grid_engine", ["-j y", "-l mem=1G", "-P x", "-notify"]),
        ("condor", ["+ProjectName = 'x'", "error_action = 1", "request_disk = 5"]),
    ],
)
def test_other_batch_options_are_kept(kind: str, options: list[str]) -> None:
    text = f'[provider]\nkind = "{kind}"\noptions = [{", ".join(map(json.dumps, options))}]'
    assert list(parse_site(text, file="s").provider.options) == options


@pytest.mark.parametrize(
    ("kind", "init"),
    [("slurm", "\n# ours\n#SBATCH --chdir=/tmp\ntrue"), ("lsf", "true\n#BSUB -J x"), ("grid_engine", "true\n#$ -N x")],
)
def test_forbidden_batch_directive_in_worker_init_is_refused(kind: str, init: str) -> None:
    with pytest.raises(ConfigError, match=r"line 3: \[provider\] worker_init has #.*is not allowed in a site file"):
        parse_site(f"[provider]\nkind = '{kind}'\nworker_init = {json.dumps(init)}", file="s")
    assert parse_site(f"[provider]\nkind = 'slurm'\nworker_init = {json.dumps('true' + init)}", file="s")


@given(st.text(alphabet="ab=[]{}\"'#.\n 1x_", max_size=60))
def test_arbitrary_text_parses_as_a_site_or_raises_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_site(text, file="f"), Site)
        return
    with pytest.raises(ConfigError, match=r"^f: line [1-9][0-9]*: .*$") as caught:
        parse_site(text, file="f")
    assert "\n" not in str(caught.value)


def test_idle_time_of_a_block_depends_on_the_session_or_the_site() -> None:
    silent, explicit = parse_site("", file="a"), parse_site('[policy]\nidle = "5 min"', file="b")
    assert [create_source(silent, kept=kept).idle_s for kept in (False, True)] == [120.0, 1800.0]
    assert [create_source(explicit, kept=kept).idle_s for kept in (False, True)] == [300.0, 300.0]


# ---- units


RATES = {
    "1.2 GB/s": 1.2e9, "500MB/s": 5e8, "1 GiB / s": 2.0**30, "10 Gbit/s": 1.25e9, "8 bit/s": 1.0, "3 B/s": 3.0,
    "unlimited": math.inf,
}  # fmt: skip


@pytest.mark.parametrize("text", RATES)
def test_rates_are_in_bytes_per_second(text: str) -> None:
    assert parse_rate(text) == pytest.approx(RATES[text])


@pytest.mark.parametrize("text", ["10 Gb/s", "1.2 GB", "1.2", "fast", "-1 GB/s", "1 GB/min", "", -1.0, math.nan, True])
def test_invalid_rate_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(UnitError, match="is not a rate"):
        parse_rate(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "4.0 ms"), (9.96, "10 s"), (82, "1 min 22 s"), (8040, "2 h 14 min"), (math.inf, "unlimited")],
)
def test_durations_are_shown_in_their_largest_units(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
