"""Check the names of the public modules, because removing a name breaks programs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import stoker

HERE = Path(__file__).parents[2]
APPS = sorted((HERE / "apps").rglob("*.py"))
NAMES = {
    "config": {
        "Duration", "Engine", "Pilot", "Policy", "Provider", "ProviderKind", "Session", "Site", "Size", "load_site",
        "parse_site", "read_unit", "with_default_policy",
    },
    "console": {
        "ByteSize", "Progress", "Redrawn", "Screen", "WholeNumber", "error", "is_terminal", "json", "line", "lines",
        "note", "redrawn",
    },
    "contexts": {
        "Awareness", "CausalLM", "EncoderModel", "EncoderProfile", "EngineSettings", "Evicted", "Family", "Gang",
        "Needs", "ObjectRef", "Recipe", "RecipeFactory", "RelayedTexts", "RuntimeLengths",
        "as_recipe", "causal_lm", "check_adapter", "context", "default_model", "device", "devices", "dtype_named",
        "encoder", "encoder_class", "encoder_family", "longest_input", "may_be_shared",
        "family", "gang", "keep_encoder_profile", "kept_encoder_profile", "lengths_that_pay", "load_causal_lm",
        "load_variable_from_serverless", "token_counter",
        "local_path", "model_recipe", "progress", "recipe_of", "saved_state", "scratch", "shown_name", "state_folder",
    },
    "datafile": {"Line", "Row", "digest_file", "read_lines", "read_rows", "text_field", "write_rows"},
    "decoding": {"UNREADABLE", "read_text", "why_not_json"},
    "planning": {"Work"},
    "run_folder": {"Record", "RecordLog", "RunFolder", "is_finished", "open_run", "read_options", "write_whole"},
    "sessions": {
        "AppCallFuture", "CallForecast", "CallFuture", "CallProgress", "Clock", "ContextFacts", "ContextStatus",
        "Features", "FollowedSession", "GatewayNote", "KeptSession", "ListedCall", "ListedState", "Observer",
        "ServedModelFigures", "Session", "Status", "StokerApp", "WRITTEN_EVERY_S", "WorkerFacts",
        "checkpoint_of", "context_facts", "facts_of", "honoured_by", "joined_session",
        "journal_trouble", "kept_session", "observe", "policy_of",
        "remove_gateway_note", "sent_call", "write_gateway_note",
    },
    "toml_files": {"nearest", "parse_toml", "read_struct", "setting_error", "refuse_unknown"},
    "tuning": {
        "RESULT", "SHIPPED_PROMPTS", "BankPlace", "Candidate", "Job", "Metric", "Order", "Sample", "Saved", "Tuned",
        "digest_job", "digest_samples", "fill_bank", "is_over", "pack", "read_candidates", "read_job", "read_paces",
        "read_samples", "refuse_unreachable", "run_job", "split", "unpack", "write_tuned",
    },
}  # fmt: skip
"""Exported names of each public module, except `errors` and `units`, which export all their definitions.
"""
NEED_TORCH = {"CausalLM", "fill_bank", "run_job"}


def test_stoker_has_exactly_the_listed_public_modules():
    assert {*NAMES, "errors", "units"} == set(stoker._MODULES)


@pytest.mark.parametrize("module", NAMES)
def test_names_of_a_public_module_exist_and_are_documented(module):
    found = importlib.import_module(f"stoker.{module}")
    assert set(found.__all__) == NAMES[module]
    assert len(found.__doc__.splitlines()) > 1
    for name in NAMES[module] - NEED_TORCH:
        value = getattr(found, name)
        if not isinstance(value, str | Path | tuple) and not repr(value).startswith(("dict", "typing")):
            assert value.__doc__, f"{module}.{name}"
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", APPS, ids=lambda path: str(path.relative_to(HERE)))
def test_application_uses_only_exported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {one.name for one in node.names if one.name.startswith("stoker")} <= {"stoker"}, path
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("stoker"):
            continue
        taken = {one.name for one in node.names}
        if node.module == "stoker":
            assert taken <= {*stoker.__all__, *stoker._MODULES}, f"{path}:{node.lineno}"
        elif not node.module.startswith("stoker.apps."):
            assert node.module.removeprefix("stoker.") in stoker._MODULES, f"{path}:{node.lineno}"
            public = importlib.import_module(node.module)
            known = getattr(public, "__all__", [name for name in vars(public) if not name.startswith("_")])
            assert taken <= set(known), f"{path}:{node.lineno}"


def test_heavy_modules_are_imported_only_on_use():
    code = """
import sys, stoker
def loaded(*names): print(sorted(set(names) & sys.modules.keys()))
print(sorted(name for name in sys.modules if name.startswith("stoker.")))
loaded("parsl", "zmq", "torch", "transformers", "numpy", "rich", "cloudpickle", "psutil")
print(stoker.errors.StokerError.__name__, stoker.contexts.context.__name__, stoker.units.__name__)
import stoker.manager.main, stoker.pilot.main, stoker.manager.factory.main
loaded("parsl", "asyncio")
for name in stoker._MODULES: getattr(stoker, name)
from stoker.tuning import Job, read_job, Order, Tuned, read_samples, Candidate
import stoker.manager.executor.client
loaded("torch", "transformers", "parsl")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    imports = ["['stoker.startup']", "[]", "StokerError context stoker.units", "[]", "[]"]
    assert done.stdout.splitlines() == imports, done.stdout + done.stderr
