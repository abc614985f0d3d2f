"""What to do about a failure, by whose fault it is and what failed: the one table of it.

A remedy begins with a verb, and fits one line of a terminal. `{}` stands for what is asked about.
"""

from __future__ import annotations

from stoker.manager.advice.logs.fault import Fault, FaultKind

_I, _F, _U = FaultKind.INFRASTRUCTURE, FaultKind.FRAMEWORK, FaultKind.USER

BY_COMPONENT: dict[tuple[FaultKind, str], str] = {
    (_U, "code"): "mend that line; try the function without a session, with the same arguments",
    (_U, "crash"): "run the function by itself with the same arguments; what it printed: stoker logs {}",
    (_U, "command"): "run that command by itself on a node; what it printed: stoker logs {}",
    (_U, "context"): "try the loader without a session: LOADER.load_here(...)",
    (_U, "data"): "give a path that the nodes see too; a relative path begins in the program's folder",
    (_U, "damaged_file"): "look at what it read there, and at its size; copy or download it again",
    (_U, "service"): "ask it from a node: many have no way to the internet, and `localhost` is the node itself",
    (_U, "result"): "return plain values or arrays, of types that the program can import too",
    (_U, "package"): "install it where the pilots run, or import your own module in the function: then it travels",
    (_U, "declared_memory"): "declare more with @context(memory=...), or do less at once",
    (_U, "memory"): "ask for more memory ([provider] memory in the site file), or do less at once",
    (_U, "gpu_memory"): "make batches smaller, load with a smaller dtype, or ask for a larger device",
    (_U, "time"): "raise `timeout` of @app, or find out what it waits for: stoker logs {}",
    (_U, "walltime"): "raise [provider] walltime, or save what is done: stoker.progress(state=...)",
    (_U, "disk"): "make room in that folder: it is full, or your quota is used up",
    (_U, "config"): "mend the setting that the line names",
    (_U, "network"): "check the token and the name, and whether you may use what they belong to",
    (_U, "scheduler"): "ask for what the job or the partition has: nodes, tasks, memory ([provider] in the site file)",
    (_U, "site"): "mend the site file; stoker doctor SITE checks it without a job",
    (_U, "other_user"): 'open it, or [provider] shared_files = false with [environment] kind = "packed"',
    (_F, "package"): "install it where the pilots run, or import your own module in the function: then it travels",
    (_F, "environment"): "mend [environment] python or [provider] worker_init; stoker doctor SITE --probe tries a node",
    (_F, "versions"): "install versions that fit together; compare `pip list` here and on the node",
    (_F, "dataloader"): "ask for more shared memory (/dev/shm), or load data with fewer workers",
    (_F, "nccl"): "give each rank a device of its own, and the same NCCL everywhere",
    (_F, "torch"): "try another version of PyTorch, or another type or device for this operation",
    (_I, "gpu"): "submit it again if it has ended; tell those who run the cluster of the device",
    (_I, "nvlink"): "tell those who run the cluster of the device",
    (_I, "gpu_memory"): "declare device_memory in @context, so that calls which others crowd out run elsewhere",
    (_I, "network"): "submit again; if it goes on, tell those who run the cluster of the hosts in the lines",
    (_I, "filesystem"): "submit again; if it goes on, show the lines to those who run the file server",
    (_I, "disk"): "submit again; if the disk is full, make room there, or name another one with [pilot] scratch",
    (_I, "memory"): "submit it again if it has ended; ask for whole nodes, where nobody else takes the memory",
    (_I, "node"): "submit again; if it is the same node, leave it out ([provider] options, such as --exclude)",
    (_I, "scheduler"): "nothing: calls go to other pilots; if it is often, try another partition or a shorter walltime",
    (_I, "licence"): "submit again when the licence server answers",
}  # fmt: skip
"""By fault and component."""
BY_KIND: dict[FaultKind, str] = {
    _U: "mend what the lines say, in the program or in what it is given",
    _F: "install versions that fit each other and the machine",
    _I: "submit again; if it goes on, show the lines to those who run the cluster",
}
"""For components without a row."""


def remedy(fault: Fault, subject: str) -> str:
    """What to do about the failure of a subject (`c-12`, `b1`, a pilot)."""
    return BY_COMPONENT.get((fault.kind, fault.component), BY_KIND[fault.kind]).format(subject)
