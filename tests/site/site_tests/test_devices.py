"""Calls see their own device, and the memory ledger agrees with the driver."""

from __future__ import annotations

from stoker.sessions import Session, Status
from stoker.site_tests import on_pilot
from stoker.site_tests.promise import broken, not_tried, promise
from stoker.site_tests.subject import Subject

_LEDGER_ERROR = 0.05
_HELD_BYTES = 2_000_000_000
_MEMORY = "look at the library in `stoker status`; tell your admin if nvidia-smi shows processes that have ended"


@promise(
    "a call sees its device and no other",
    limit="90 s",
    remedy="unset CUDA_VISIBLE_DEVICES in [provider] worker_init; ask your admin how jobs are confined to their GPUs",
)
def test_a_call_sees_its_device_and_no_other(subject: Subject) -> None:
    session = subject.main()
    offered = {device.kind for pilot in session.status().pilots for device in pilot.devices}
    call = subject.call(on_pilot.seen_device, context=on_pilot.table("looks"))
    seen = subject.result(call, within_s=60, what="a call that looks at its device")
    if seen.device.startswith("cuda"):
        if not seen.visible or "," in seen.visible:
            broken(f"CUDA_VISIBLE_DEVICES is {seen.visible!r} in a call, which should see one device")
        if seen.torch_gpus > 1:
            broken(f"PyTorch sees {seen.torch_gpus} GPUs in a call on one device")
        subject.note(seen.said)
    elif seen.visible:
        broken(f"a call on a CPU device sees GPUs: CUDA_VISIBLE_DEVICES is {seen.visible!r}")
    elif "cpu" not in offered:
        broken(f"a call on {', '.join(sorted(offered))} sees no GPU: its device is {seen.device}")


@promise(
    "a context over two devices holds both",
    limit="2 min",
    remedy="ask for two GPUs of one kind per node in [provider] gpus",
)
def test_a_context_over_two_devices_holds_both(subject: Subject) -> None:
    session = subject.main()
    most = 0
    for pilot in session.status().pilots:
        kinds = [device.kind for device in pilot.devices if not device.fault]
        most = max([most, *(kinds.count(kind) for kind in kinds)])
    if most < 2:
        not_tried("no pilot here has two devices of one kind")
    call = subject.call(on_pilot.held_devices, context=on_pilot.over_two_devices())
    held = subject.result(call, within_s=90, what="a call of a context over two devices")
    if len(held) != 2 or (held[0] != "cpu" and held[0] == held[1]):
        broken(f"a context over two devices got {held}")


@promise("the memory ledger agrees with NVML within 5 %", limit="2 min", remedy=_MEMORY)
def test_the_memory_ledger_agrees_with_nvml(subject: Subject) -> None:
    _skip_without_gpu(subject)
    recipe = on_pilot.on_device(_HELD_BYTES)
    use = subject.result(subject.call(on_pilot.device_use, context=recipe), within_s=90, what="a call with GPU memory")
    if use.why:
        not_tried(use.why)
    if not use.process:
        not_tried("NVML does not say what a process uses here (another PID namespace, or MIG)")
    said: list[int] = []

    def agrees(status: Status) -> bool:
        said[:] = [each.device_bytes for each in status.libraries if each.recipe == recipe.name]
        return any(abs(known - use.process) <= _LEDGER_ERROR * use.process for known in said)

    subject.until(
        agrees,
        within_s=20,
        what=f"a ledger entry within 5 % of NVML's {use.process:,} bytes",
        found=lambda: f"the ledger has {said}",
    )


@promise("too much device memory is a clear error, and the device recovers", limit="2 min", remedy=_MEMORY)
def test_too_much_device_memory_is_a_clear_error(subject: Subject) -> None:
    session = _skip_without_gpu(subject)
    recipe = on_pilot.on_device(_HELD_BYTES)
    error = subject.error(subject.call(on_pilot.ask_too_much, context=recipe), within_s=90, otherwise=not_tried)
    if "memory" not in str(error).lower():
        broken(f"a call that asked for a petabyte of device memory ended so: {error!r}")
    use = subject.result(subject.call(on_pilot.device_use, context=recipe), within_s=60, what="the next call")
    faults = [device.fault for pilot in session.status().pilots for device in pilot.devices if device.fault]
    if faults:
        broken(f"the device did not recover: {faults[0]}")
    if use.device > use.total:
        broken(f"NVML says that {use.device:,} of {use.total:,} bytes are used")


def _skip_without_gpu(subject: Subject) -> Session:
    session = subject.main()
    kinds = {device.kind for pilot in session.status().pilots for device in pilot.devices if not device.fault}
    if kinds <= {"cpu"}:
        not_tried("the pilots of this site offer no GPU")
    return session
