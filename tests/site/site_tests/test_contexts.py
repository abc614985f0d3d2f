"""Contexts load once, serve many calls, and load again after a loss."""

from __future__ import annotations

from stoker.errors import CallError
from stoker.site_tests import on_pilot
from stoker.site_tests.promise import broken, not_tried, promise
from stoker.site_tests.subject import Subject
from stoker.units import show_bytes

_REMEDY = "read the library's log below the pilot's folder"


@promise("a context loads once and serves the next call", limit="60 s", remedy=_REMEDY)
def test_a_context_is_hot_for_the_second_call(subject: Subject) -> None:
    session = subject.main()
    recipe = on_pilot.table("hot")
    first, second = (
        subject.result(subject.call(on_pilot.loaded_in, context=recipe), within_s=30, what="a call with a context")
        for _ in range(2)
    )
    loads = next(each.loads for each in session.status().contexts if each.key == recipe.key)
    if loads != 1 or first != second or first[1] != first[2]:
        broken(f"two calls in a row needed {loads} loads (processes {first[2]} and {second[2]})")


@promise("a context returns after its library was killed", limit="60 s", remedy=_REMEDY)
def test_a_context_returns_after_its_library_was_killed(subject: Subject) -> None:
    subject.main()
    recipe = on_pilot.table("returns")
    _, victim, _ = subject.result(subject.call(on_pilot.loaded_in, context=recipe), within_s=30, what="the first call")
    kill = subject.call(on_pilot.end_library, victim, context=recipe)
    after = subject.result(kill, within_s=45, what="a call whose library was killed")
    if after == victim:
        broken(f"the library with process {victim} survived SIGKILL")


@promise(
    "a model returns from its snapshot after its library was killed",
    limit="3 min",
    remedy="name a folder with free space in [pilot] scratch; snapshots lie below it",
)
def test_a_model_returns_from_its_snapshot(subject: Subject) -> None:
    session = subject.main()
    recipe = on_pilot.pickled_llama()
    origins, texts = [], set()
    for _ in range(2 + len(session.status().pilots)):  # each pilot makes a snapshot at its first load
        call = subject.call(on_pilot.origin_and_text, context=recipe)
        origin, text, library, why = subject.result(call, within_s=60, what="a call of a pickled model")
        if why:
            not_tried(why)
        origins.append(origin)
        texts.add(text)
        if len(origins) > 1 and origin.startswith("snapshot") and "just made" not in origin:
            break
        kill = subject.call(on_pilot.end_library, library, context=recipe)
        subject.result(kill, within_s=60, what="a call whose library was killed")
    else:
        broken(f"no load used a snapshot that was there; they were: {', '.join(origins)}")
    if len(texts) > 1:
        broken(f"the model and its snapshot wrote different texts: {sorted(texts)}")


@promise(
    "two contexts share a device",
    limit="90 s",
    remedy="name fewer bytes in `device_memory` of the contexts, or ask for devices with more memory",
)
def test_two_contexts_share_a_device(subject: Subject) -> None:
    subject.skip_without_own_pilots("it decides where libraries are")
    session = subject.main()
    count = sum(len(pilot.devices) for pilot in session.status().pilots)
    recipes = [on_pilot.table("first"), on_pilot.table("second")]
    subject.result(session.warm(recipes[0], count), within_s=40, what="loading a context on each device")
    looks = [subject.call(on_pilot.seen_device, context=recipes[0]) for _ in range(4 * count)]
    said = {subject.result(look, within_s=30, what="a call that looks at its device").said for look in looks}
    if alone := [each for each in said if "EXCLUSIVE" in each]:
        not_tried(f"a GPU here takes one process at a time ({alone[0]})")
    for recipe in recipes:
        subject.result(session.warm(recipe, count), within_s=40, what=f"loading {recipe.name} on each device")
    places = [
        {(library.pilot, library.devices) for library in session.status().libraries if library.recipe == recipe.name}
        for recipe in recipes
    ]
    found = [subject.result(subject.call(on_pilot.loaded_in, context=each), within_s=30, what="a call of it")
             for each in recipes]  # fmt: skip
    if [name for name, *_ in found] != ["first", "second"]:
        broken(f"calls of two contexts on one device got {[name for name, *_ in found]}")
    if not places[0] & places[1]:
        broken(f"no device holds both contexts: the first is on {sorted(places[0])}, the second on {sorted(places[1])}")


@promise(
    "an engine writes the tokens that Transformers writes",
    limit="3 min",
    remedy='use another version of Transformers or PyTorch, or engine="static"',
)
def test_an_engine_writes_the_models_own_tokens(subject: Subject) -> None:
    subject.main()
    call = subject.call(on_pilot.two_texts, ["one day", "a", "GPU time is short"], 24, context=on_pilot.tiny_llama())
    written, own, why = subject.result(call, within_s=170, what="a call of a small language model")
    if why:
        not_tried(why)
    if written != own:
        broken(f"Stoker's engine wrote {written}, and Transformers {own}")


@promise(
    "too much host memory is a clear error, and the next call runs",
    limit="90 s",
    remedy="declare `memory` of contexts below what the job has; check that pilots can read /proc of their libraries",
)
def test_too_much_host_memory_is_a_clear_error(subject: Subject) -> None:
    session = subject.main()
    taken = 2 * on_pilot.SMALL_BYTES
    most = min(device.memory_bytes for pilot in session.status().pilots for device in pilot.devices)
    if most < taken:
        not_tried(f"a device here has {show_bytes(most)}; the test takes {show_bytes(taken)}")
    recipe = on_pilot.small_table()
    error = subject.error(subject.call(on_pilot.fill_memory, taken, context=recipe), within_s=60)
    if not isinstance(error, CallError) or "memory" not in str(error):
        broken(f"a call that took twice the memory that its context declares ended so: {error!r}")
    after = subject.result(subject.call(on_pilot.answer, context=recipe), within_s=30, what="the next call")
    if after != 42:
        broken(f"the next call returned {after!r}, not 42")
