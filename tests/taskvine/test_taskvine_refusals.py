from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import load_site, parse_site
from stoker.contexts import context
from stoker.errors import ConfigError
from stoker.manager.executor import blocks, engines, new_sessions
from stoker.manager.executor.options import parse_call_specification
from stoker.manager.taskvine import refusals
from stoker.site import Engine, Site


def load():
    return 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[provider]\nkind = "pbs"', 'kind = "pbs": the TaskVine factory supports only "local", "slurm", "condor"'),
        ('sites = ["other.toml"]', "sites: a session with TaskVine has one site"),
        ('[provider]\nkind = "slurm"\nnodes = 2', "nodes = 2: a worker is one node"),
        ('[environment]\nkind = "packed"', 'kind = "packed": TaskVine libraries run in this environment'),
        ('[policy]\nprovisioning = "demand"', 'provisioning = "demand": TaskVine sets'),
        ("[policy]\nkeep_pending = 7", "keep_pending: TaskVine sets"),
    ],
)
def test_unsupported_site_setting_is_refused(text, said):
    site = parse_site(f'name = "pool"\nengine = "taskvine"\n{text}\n', file="site.toml")
    with pytest.raises(ConfigError) as caught:
        refusals.refuse_unsupported_site(site)
    assert str(caught.value).startswith('site pool: engine = "taskvine" cannot honour ')
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_memory": "4 GB"}, "device_memory: TaskVine gives a library whole GPUs"),
        ({"slots": 2}, "slots = 2: "),
        ({"awareness": "disk"}, 'awareness = "disk": '),
        ({"calls_per_library": 5}, "calls_per_library: "),
        ({"kinds": ["NVIDIA A10"]}, 'kinds = "NVIDIA A10": '),
    ],
)
def test_unsupported_option_of_a_context_is_refused(options, said):
    recipe = context(**options)(load)()
    with pytest.raises(ConfigError) as caught:
        refusals.refuse_unsupported_call(recipe, parse_call_specification({}).options)
    assert str(caught.value).startswith(f'{recipe.name}: engine = "taskvine" cannot honour {said}')


@pytest.mark.parametrize(
    ("specification", "said"),
    [
        ({"deadline_s": "1 h"}, "deadline: TaskVine runs calls in the order of their submission"),
        ({"latency_s": 2}, "latency: "),
        ({"ttft_s": 2}, "ttft: "),
        ({"ttft_per_token_s": 0.01}, "ttft_per_token: "),
        ({"gang": 2}, "gang = (2, 2): TaskVine starts one library per call"),
        ({"stream": True}, "stream: a call that runs in a library sends nothing before its end"),
    ],
)
def test_unsupported_option_of_a_call_is_refused(specification, said):
    recipe = context(load)()
    wants = parse_call_specification({"context": recipe, **specification})
    with pytest.raises(ConfigError) as caught:
        engines.refuse_unsupported_options(Site(engine=Engine.TASKVINE), wants, honours=None)
    assert said in str(caught.value)
    assert caught.value.key == said.partition(":")[0]
    engines.refuse_unsupported_options(Site(), wants, honours=None)  # Stoker's own engine supports these features


def test_error_names_every_refused_setting():
    recipe = context(slots=2)(load)()
    wants = parse_call_specification({"context": recipe, "gang": 2, "variants": [recipe]})
    with pytest.raises(ConfigError, match=r"slots = 2: .*; also gang = \(2, 2\), variants"):
        engines.refuse_unsupported_options(Site(engine=Engine.TASKVINE), wants, honours=None)


def test_supported_options_are_accepted():
    for kind in ("local", "slurm", "condor"):
        refusals.refuse_unsupported_site(
            parse_site(f'engine = "taskvine"\n[provider]\nkind = "{kind}"\n', file="site.toml")
        )
    shipped = load_site(Path(__file__).parents[2] / "site-configs" / "taskvine.toml")
    assert shipped.engine is Engine.TASKVINE
    refusals.refuse_unsupported_site(shipped)
    recipe = context(memory="1 GB", devices=2, load_limit="1 min")(load)()
    wants = parse_call_specification({"context": recipe, "priority": 3, "timeout_s": "1 min"})
    engines.refuse_unsupported_options(Site(engine=Engine.TASKVINE), wants, honours=None)


@pytest.mark.usefixtures("no_taskvine")
def test_missing_taskvine_error_shows_the_install_command(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"ndcctools\.taskvine.*conda install -c conda-forge ndcctools"):
        engines.check_taskvine_sites([Site(engine=Engine.TASKVINE)], provider=None)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    (tmp_path / "pool.toml").write_text('engine = "taskvine"')
    sites = new_sessions.load_listed_sites([tmp_path / "pool.toml"])  # a dry run does not need TaskVine
    with pytest.raises(ConfigError, match="conda install -c conda-forge ndcctools"):
        new_sessions.create_session(sites)
    assert not (tmp_path / "home").exists()


def test_taskvine_session_with_two_sites_or_a_provider_is_refused():
    vine = Site(name="pool", engine=Engine.TASKVINE)
    with pytest.raises(ConfigError, match="has one site; remove local from sites"):
        engines.check_taskvine_sites([Site(), vine], provider=None)
    with pytest.raises(ConfigError, match="leave provider= out"):
        engines.check_taskvine_sites([vine], provider=blocks.create_local_provider(Site()))
