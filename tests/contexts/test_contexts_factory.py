from __future__ import annotations

import asyncio
import functools
import threading
from pathlib import Path
from typing import Any

import pytest

from stoker.contexts import Awareness, as_recipe, context, payloads, recipe_of
from stoker.contexts.loading import load_context
from stoker.contexts.recipe import LibraryLimits
from stoker.errors import RecipeError
from stoker.units import parse_bytes


@context
def plain(path: str, *, n: int = 3) -> dict[str, Any]:
    return {"path": path, "n": n}


@context(memory="4 GB", device_memory="2 GiB", disk="1 GB", devices=2, kinds=("NVIDIA A10", "cpu"), slots=3,
         load_limit="90 s", awareness="disk", calls_per_library=7)  # fmt: skip
def full(path: str) -> str:
    return path


def test_recipe_declares_its_requirements() -> None:
    recipe = full("m")
    assert recipe.needs.memory_bytes == 4 * 10**9
    assert recipe.needs.device_memory_bytes == 2 * 2**30
    assert recipe.needs.disk_bytes == 10**9
    assert recipe.needs.devices == 2
    assert recipe.needs.kinds == ("NVIDIA A10", "cpu")
    assert recipe.needs.load_limit_s == 90
    assert (recipe.slots, recipe.awareness, recipe.calls_per_library) == (3, Awareness.DISK, 7)
    assert recipe.name == f"full-{recipe.key[:4]}"
    for awareness in ("none", "disk"):
        assert context(awareness=awareness)(plain.loader)("m").calls_per_library == 1, "its library serves one call"


def test_recipe_key_depends_on_its_content_and_not_on_its_name() -> None:
    assert plain("a").key == plain("a").key
    assert plain("a", n=4).key != plain("a").key
    assert plain("a").key != plain("b").key
    assert plain.with_options(memory="1 GB")("a").key != plain("a").key
    assert plain.named("other")("a").key == plain("a").key
    assert plain.named("other")("a").name.startswith("other-")
    slots = context(slots="auto")(plain.loader)("a")
    assert slots.slots == 0
    assert context(slots=1)(plain.loader)("a").key == plain("a").key != slots.key


def test_loading_a_recipe_runs_its_loader_with_its_arguments() -> None:
    ran: list[int] = []
    recipe = context(lambda: ran.append(1))()
    assert ran == [], "the loader runs only when the context loads"
    load_context(recipe, {})
    assert as_recipe(recipe) is recipe
    assert load_context(plain("a", n=5), {}) == {"path": "a", "n": 5}
    assert load_context(recipe_of(lambda x, y=1: (x, y), [1], {"y": 2}), {}) == (1, 2)
    assert load_context(recipe_of(functools.partial(max, 3), [5]), {}) == 5
    with pytest.raises(RecipeError, match=r"the loader of lambda-\w+ returned a coroutine: .* asyncio\.run"):
        load_context(recipe_of(lambda: asyncio.sleep(0)), {})
    assert load_context(recipe_of(lambda: asyncio.run(asyncio.sleep(0, 1))), {}) == 1
    assert recipe_of(lambda: None).name.startswith("lambda-")
    assert recipe_of(plain, ["a"]).key == plain("a").key
    assert recipe_of(plain, ["a"], memory="1 GB").needs.memory_bytes == parse_bytes("1 GB")


def test_repr_of_a_factory_or_recipe_is_one_line() -> None:
    assert repr(plain) == "<context plain(path: 'str', *, n: 'int' = 3) -> 'dict[str, Any]'; call it to make a recipe>"
    recipe = full("m")
    assert repr(recipe) == (
        f"<recipe {recipe.name}('m'), 2 devices, on NVIDIA A10 or cpu, memory 4.0 GB, device memory 2.1 GB,"
        " awareness disk>"
    )


def test_factory_can_be_pickled() -> None:
    again = payloads.loads(payloads.dumps(full))
    assert again("m").key == full("m").key
    assert load_context(again("m"), {}) == "m"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: plain(), r"plain\(path.*missing a required argument: 'path'"),
        (lambda: plain("a", "b"), "too many positional"),
        (lambda: plain("a", m=1), "unexpected keyword argument 'm'"),
        (lambda: plain(threading.Lock()), "lock"),
        (lambda: plain(plain), "is a context; write one loader"),
        (lambda: plain(path=plain("a")), "is a context"),
        (lambda: context(memry="1 GB"), "did you mean memory"),
        (lambda: context(memory=16), r'memory=16\): .*the unit of 16 is missing; write "16 GB" or "16 MB"'),  # type: ignore[call-overload]
        (lambda: context(slots="many"), r"slots='many'.*1 or more, or \"auto\""),
        (lambda: context("4 GB"), r"by name, as in @context\(memory="),
        (lambda: context(plain("a")), "by name"),
        (lambda: as_recipe(plain), r"has not been called; write context=plain\(\.\.\.\)"),
        (lambda: as_recipe(context(memory="1 B")), "has no loader"),
        (lambda: as_recipe(len), "plain function"),
        (lambda: recipe_of("nothing"), "must be a function"),  # type: ignore[arg-type]
    ],
)
def test_invalid_use_of_a_context_factory_raises_clear_errors(make: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make()
    with pytest.raises(AttributeError, match=r"call it first: plain\(\.\.\.\)"):
        plain.key  # noqa: B018


def test_declared_files_become_objects(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"123")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_bytes(b"4")

    @context(files=["weights", "more"])
    def loader(weights: str, more: list[Path] | None = None) -> Any:
        return weights, more

    @context(files=[tmp_path / "w.bin"])
    def by_path(weights: str, other: str) -> Any:
        return weights, other

    recipe = loader(str(tmp_path / "w.bin"), [tmp_path / "d"])
    assert len(recipe.objects) == 2
    local = {ref.name: f"/cache/{ref.name}" for ref in recipe.objects}
    weights, more = load_context(recipe, local)
    assert weights in local.values()
    assert weights.endswith(".bin")
    assert isinstance(weights, str)
    assert more == [Path(next(path for name, path in local.items() if name.startswith("folder-")))]
    with pytest.raises(RecipeError, match="is not on this pilot"):
        load_context(recipe, {})
    # Equal content at another path is the same context.
    (tmp_path / "copy.bin").write_bytes(b"123")
    assert loader(str(tmp_path / "copy.bin"), [tmp_path / "d"]).key == recipe.key
    (tmp_path / "copy.bin").write_bytes(b"124")
    assert loader(str(tmp_path / "copy.bin"), [tmp_path / "d"]).key != recipe.key
    assert load_context(loader(str(tmp_path / "w.bin")), local)[1] is None
    assert load_context(by_path(str(tmp_path / "w.bin"), "x"), local) == (weights, "x")


@pytest.mark.parametrize(
    ("files", "given", "says"),
    [
        ("path", "/no/such/file", "cannot be found"),
        ("path", 3, "must be a path"),
        ("path", "", "must be a path"),
        ("pth", "x", "neither a parameter of loader"),
    ],
)
def test_missing_or_invalid_files_are_refused(files: str, given: Any, says: str) -> None:
    @context(files=files)
    def loader(path: Any) -> None:
        return None

    with pytest.raises(RecipeError, match=says):
        loader(given)


def test_preload_defaults_to_the_imports_of_the_loader() -> None:
    def loader() -> Any:
        import os.path

        import numpy.linalg

        def inner() -> Any:
            from hypothesis import strategies

            return strategies

        return numpy.linalg, os, inner, pytest.raises

    assert recipe_of(loader).preload == ("hypothesis", "numpy", "pytest", "hypothesis:strategies")
    assert recipe_of(loader, preload=["numpy"]).preload == ("numpy",)
    assert recipe_of(loader, preload=["numpy"]).key == recipe_of(loader).key


def test_library_limits_do_not_change_the_key_of_a_recipe() -> None:
    limited = context(max_libraries=3, min_libraries=1, keep_alive="2 min")(plain.loader)("x")
    assert limited.limits == LibraryLimits(1, 3, 120.0)
    assert limited.key == plain("x").key
    assert "1 to 3 libraries, kept 2 min when idle" in repr(limited)
    with pytest.raises(RecipeError, match=r"min_libraries=4\): it is more than max_libraries = 3"):
        context(max_libraries=3, min_libraries=4)(plain.loader)
