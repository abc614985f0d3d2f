from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.baselines.loading import ROOT
from benchmarks.baselines.scattered import AnyFree
from stoker.config import Site, load_site, parse_site
from stoker.contexts.recipe import Awareness
from stoker.errors import ConfigError
from stoker.manager.live.restore import list_policy_modules
from stoker.manager.live.session_policies import (
    copy_policies_into_session,
    create_policies_for_sites,
    create_policies_of_session,
    find_policy,
    policies_named_by_all_sites,
    read_chosen_policies,
)
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.policies.residency import WholeDevice
from stoker.protocol.session import SessionFolder
from stoker.site import BASELINES, policy_file

MINE = '''
from stoker.manager.policies import HottestFirst, LoadWhereWanted, Quiet, default_policies

class Never(LoadWhereWanted):
    """Nothing is loaded.

    Nobody wants this.
    """

    def on_waiting_calls(self, view, context):
        return ()

class First(HottestFirst):
    def place(self, view, call):
        return next(iter(call.group.context.idle), None)

class Both(First, Never):
    pass

class Blocks(Quiet):
    def demand(self, view):
        return ()
    def may_bring(self, view, context):
        return False

class Half:
    def on_waiting_calls(self, view, context):
        return ()

class Broken:
    def __init__(self):
        raise ValueError("no way")

class Nobody:
    pass

class Slipped(LoadWhereWanted):
    def worth_lodaing(self, context, alive):
        return 1

class SlippedValue(HottestFirst):
    ask_every_call = True

class SlippedBelow(Slipped):
    """What is inherited from a class of one's own is held against the rest as well."""

class Helped(First):
    """Names of its own: near to one that it answers itself, to a value's, and to none."""
    timers = 3
    def places(self, view):
        return self.asks_every_calls(view)
    def asks_every_calls(self, view):
        return view
    def hottest_of_mine(self):
        return None

def with_settings(size):
    return LoadWhereWanted(patience_s=size)

def patient():
    return LoadWhereWanted(patience_s=99.0)

def everything():
    return default_policies()

value = 3
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def test_policy_class_replaces_only_policies_whose_methods_it_has(mine: Path) -> None:
    never = find_policy("mine.py:Never", folder=mine)
    made = never.make()
    assert (never.name, never.about, made.awareness) == ("mine.py:Never", "Nothing is loaded.", None)
    assert (type(made.dispatch), type(made.residency).__name__) == (HottestFirst, "Never")
    assert type(made.provisioning) is KeepBlocks
    assert made.residency.provisioning is made.provisioning
    first = find_policy("mine.py:First", folder=mine).make()
    assert (type(first.dispatch).__name__, type(first.residency)) == ("First", LoadWhereWanted)
    both = find_policy("mine.py:Both", folder=mine).make()
    assert both.dispatch is both.residency
    blocks = find_policy("mine.py:Blocks", folder=mine).make()
    assert type(blocks.provisioning).__name__ == "Blocks"
    assert blocks.residency.provisioning is blocks.provisioning


def test_policy_may_be_made_by_a_function(mine: Path) -> None:
    made = find_policy("mine.py:patient", folder=mine).make()
    assert made.residency.patience_s == 99.0
    assert find_policy("mine.py:patient", folder=mine).make().residency is not made.residency
    assert type(find_policy("mine.py:everything", folder=mine).make().residency) is LoadWhereWanted


def test_additional_names_in_a_policy_class_are_accepted(mine: Path) -> None:
    assert type(find_policy("mine.py:Helped", folder=mine).make().dispatch).__name__ == "Helped"


@pytest.mark.parametrize(
    ("seam", "own", "why"),
    [
        (
            "residency",
            "First",
            r"lacks on_waiting_calls, reservation_after_load; it implements dispatch: .*\(\[policy\] dispatch = …\)",
        ),
        ("dispatch", "Never", r"lacks place, pull, on_out_of_calls, window; it implements residency: "),
        (
            "residency",
            "Blocks",
            r"lacks on_waiting_calls, reservation_after_load; it implements provisioning: .*\(\[policy\] name = …\)",
        ),
    ],
)
def test_policy_without_the_methods_of_its_role_is_refused(mine: Path, seam: str, own: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"mine\.py:{own}: it is the {seam} policy, but {why}"):
        create_policies_for_sites([site(**{seam: f"{mine}/mine.py:{own}"})])
    create_policies_for_sites([site(**{seam: f"{mine}/mine.py:Both"})])
    create_policies_for_sites([site(**{"name": f"{mine}/mine.py:{own}", seam: "exclusive"})])


def test_policy_module_is_imported(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(find_policy("benchmarks.baselines.scattered:AnyFree").make().dispatch) is AnyFree
    monkeypatch.syspath_prepend(str(mine))
    assert type(find_policy("mine:First").make().dispatch).__module__ == "mine"


FAULTS = {
    "mine.py:Nevr": r"the module has no class or function Nevr; it has .*Nobody, .*Helped, .*patient, everything$",
    "mine.py:value": r"the module has no class or function value",
    "mine.py:Half": r"it implements the residency seam, but lacks reservation_after_load, on_idle_library, "
    r"honours, period_s, on_round, may_skip_rounds, on_timer, on_advice, on_failure_verdict, on_pace_advice;"
    r" derive it from stoker\.manager\.policies\.LoadWhereWanted",
    "mine.py:Broken": r"the policy object cannot be created: ValueError: no way",
    "mine.py:Nobody": r"it has no method of a seam; a policy has at least one of place \(dispatch\), on_waiting_calls"
    r" \(residency\), "
    r"demand \(provisioning\)",
    "mine.py:Slipped": r"the manager never calls its worth_lodaing; did you mean worth_loading\? \(start a name",
    "mine.py:SlippedBelow": r"the manager never calls its worth_lodaing; did you mean worth_loading\?",
    "mine.py:SlippedValue": r"the manager never calls its ask_every_call; did you mean asks_every_call\?",
    "other.py:Never": r"other\.py: no such file",
    "bad.py:Never": r"cannot be imported: SyntaxError: ",
    "no_such_module:Never": r"cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
}


@pytest.mark.parametrize("name", FAULTS)
def test_invalid_policy_is_refused_with_the_reason(mine: Path, name: str) -> None:
    (mine / "bad.py").write_text("class Never\n")
    with pytest.raises(ConfigError, match=rf"policy {name}: .*{FAULTS[name]}"):
        find_policy(name, folder=mine)


# ---- in site files


def test_policy_paths_in_a_site_file_are_relative_to_that_file(mine: Path) -> None:
    (mine / "site.toml").write_text('[policy]\nname = "exclusive"\ndispatch = "mine.py:First"\n')
    policy = load_site(mine / "site.toml").policy
    assert (policy.name, policy.dispatch, policy.residency) == ("exclusive", f"{mine}/mine.py:First", "")
    assert load_site("../site.toml").policy == policy


SITE_FAULTS = {
    'name = "exclusiv"': "name = 'exclusiv' is not a policy; did you mean 'exclusive'? "
    '(a policy of your own: "module:Class" or "path.py:Class")',
    'residency = "qqq"': "residency = 'qqq' is not a policy; there are default, shortest-first, exclusive, "
    'prompt-tuner, slinfer, arlo (a policy of your own: "module:Class" or "path.py:Class")',
    'dispatch = "mine.py:"': 'dispatch = \'mine.py:\': write a policy of your own as "module:Class" or "path.py:Class"',
    'name = ""': "name = '' is not a policy; there are default, shortest-first, exclusive, "
    'prompt-tuner, slinfer, arlo (a policy of your own: "module:Class" or "path.py:Class")',
}


@pytest.mark.parametrize("line", SITE_FAULTS)
def test_unknown_policy_name_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_site(f"[policy]\n\n{line}\n", file="site.toml")
    assert str(caught.value) == f"site.toml: line 3: [policy] {SITE_FAULTS[line]}"


def site(called: str = "one", /, **policy: str) -> Site:
    lines = "\n".join(f'{setting} = "{value}"' for setting, value in policy.items())
    return parse_site(f'name = "{called}"\n[policy]\n{lines}\n', file="site.toml")


def test_sites_of_a_session_name_the_same_policy_or_none(mine: Path) -> None:
    one, two = site("one", name="prompt-tuner"), site("two", name="exclusive")
    assert policies_named_by_all_sites([site("three"), one, site("four", name="prompt-tuner")]).name == "prompt-tuner"
    assert policies_named_by_all_sites([site("one"), site("two")]).name == "default"
    with pytest.raises(ConfigError, match="sites one and two name different policies; a session has one"):
        policies_named_by_all_sites([one, two])
    with pytest.raises(ConfigError, match=r"policy mine\.py:Never: .*/elsewhere/mine\.py: no such file"):
        create_policies_for_sites([site(name="mine.py:Never")])
    create_policies_for_sites([site(name=f"{mine}/mine.py:Never")])


# ---- in a session's folder


def test_session_keeps_its_policy_when_the_file_is_deleted(mine: Path, tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    copy_policies_into_session(folder, [site(name="exclusive", dispatch=f"{mine}/mine.py:First")])
    (mine / "mine.py").unlink()
    made = create_policies_of_session(folder)
    assert (type(made.dispatch).__name__, type(made.residency)) == ("First", WholeDevice)
    assert made.residency.provisioning is made.provisioning
    assert create_policies_of_session(folder).dispatch is not made.dispatch


def test_policy_files_of_the_same_name_stay_separate(mine: Path, tmp_path: Path) -> None:
    other = mine / "other"
    other.mkdir()
    (other / "mine.py").write_text(re.sub(r"\bFirst\b", "Second", MINE))
    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    copy_policies_into_session(folder, [site(dispatch=f"{other}/mine.py:Second", residency=f"{mine}/mine.py:Never")])
    made = create_policies_of_session(folder)
    assert (type(made.dispatch).__name__, type(made.residency).__name__) == ("Second", "Never")


PACKAGE = {
    "lab/__init__.py": "",
    "lab/limits.py": "SLOTS = 3\n",
    "lab/policies/__init__.py": "",
    "lab/policies/fair.py": "from lab.limits import SLOTS\nfrom stoker.manager.policies import HottestFirst\n\n\n"
    "class Few(HottestFirst):\n    slots = SLOTS\n",
}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Path]:
    for name, text in PACKAGE.items():
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_text(text)
    yield tmp_path / "theirs"
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]


def test_policy_in_a_package_imports_its_neighbours(lab: Path) -> None:
    before = list(sys.path)
    dispatch = find_policy("lab/policies/fair.py:Few", folder=lab).make().dispatch
    assert (dispatch.slots, type(dispatch).__module__) == (3, "lab.policies.fair")
    assert sys.path == before


def test_session_keeps_the_package_of_a_policy(lab: Path, tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    copy_policies_into_session(folder, [site(dispatch=f"{lab}/lab/policies/fair.py:Few")])
    shutil.rmtree(lab)
    made = create_policies_of_session(folder).dispatch
    assert made.slots == 3
    assert str(sys.modules["lab.limits"].__file__).startswith(str(tmp_path / "session" / "packages"))
    assert (folder.path / policy_file(read_chosen_policies(folder).dispatch)).is_file()


def test_snapshot_includes_the_modules_of_the_policy_package(lab: Path) -> None:
    made = find_policy("lab/policies/fair.py:Few", folder=lab).make()
    assert {"lab.policies.fair", "lab.limits"} <= list_policy_modules(made)


def test_packages_with_one_name_in_two_folders_stay_separate(lab: Path, tmp_path: Path) -> None:
    other = tmp_path / "ours"
    shutil.copytree(lab, other)
    (other / "lab" / "limits.py").write_text("SLOTS = 7\n")
    places = (lab, other, lab)
    found = [find_policy("lab/policies/fair.py:Few", folder=place).make().dispatch for place in places]
    assert [each.slots for each in found] == [3, 7, 3]


def test_settings_are_keyword_arguments_of_the_policy(mine: Path) -> None:
    made = find_policy("mine.py:Never", folder=mine).make(patience_s=7.0)
    assert made.residency.patience_s == 7.0
    with pytest.raises(ConfigError, match=r"First: the policy object cannot be created: TypeError: .*patience"):
        find_policy("mine.py:First", folder=mine).make(patience_s=7.0)


def test_policy_class_sets_the_awareness_level_of_contexts(mine: Path) -> None:
    (mine / "less.py").write_text(MINE + "\nclass Less(First):\n    awareness = 'disk'\n")
    assert find_policy("less.py:Less", folder=mine).make().awareness is Awareness.DISK
    (mine / "wrong.py").write_text(MINE + "\nclass Less(First):\n    awareness = 'half'\n")
    with pytest.raises(ConfigError, match="awareness = 'half' is not a level; the levels are 'none', 'disk', 'full'"):
        find_policy("wrong.py:Less", folder=mine)


def test_default_session_has_the_default_policy_and_no_file(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path)
    folder.create_folders()
    copy_policies_into_session(folder, [Site.default()])
    assert not (tmp_path / "policies.json").exists()
    assert type(create_policies_of_session(folder).residency) is LoadWhereWanted


def test_session_also_keeps_modules_that_the_policy_imports(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine / "their_policies.py").write_text(MINE)
    folder = SessionFolder(tmp_path / "session")
    folder.create_folders()
    monkeypatch.setattr(sys, "path", list(sys.path))
    copy_policies_into_session(folder, [site(name="their_policies:Never")], search_path=str(mine))
    assert type(create_policies_of_session(folder).residency).__module__ == "their_policies"


def test_no_awareness_policy_warns_which_contexts_it_is_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = SessionFolder(tmp_path)
    folder.create_folders()
    copy_policies_into_session(folder, [site(name=f"{ROOT}/{BASELINES['no-awareness']}")])
    assert "policy forgetful.py:no_awareness is for contexts of awareness none; " in caplog.text
    assert 'write @context(awareness="none")' in caplog.text
