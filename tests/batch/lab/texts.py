"""Render the configuration files of a cluster from its shape and place."""

from __future__ import annotations

from batch.lab.shape import Place, Shape

_PORTS = {"slurmctld": 0, "slurmdbd": 1, "mariadb": 2}
_FIRST_NODE = 10
_DAEMONS_WAIT_S = 30


def port(place: Place, daemon: str) -> int:
    return place.port + _PORTS[daemon]


def ports_needed(shape: Shape) -> int:
    return _FIRST_NODE + len(shape.nodes) + 1


def files(shape: Shape, place: Place) -> dict[str, str]:
    texts = {
        place.conf.name: slurm_conf(shape, place),
        place.daemons_conf.name: slurm_conf(shape, place, message_s=_DAEMONS_WAIT_S),
        "gres.conf": gres_conf(shape, place),
        "cgroup.conf": cgroup_conf(place),
        "hosts": hosts(shape),
    }
    if shape.accounting:
        texts["slurmdbd.conf"] = slurmdbd_conf(shape, place)
    return texts


def slurm_conf(shape: Shape, place: Place, *, message_s: int = 5) -> str:
    """Return the slurm.conf of clients. The file of daemons differs only in `message_s`, the message timeout in
    seconds.
    """
    settings = {**_daemons(shape, place), **_scheduling(shape), **_patience(shape), **_accounting(shape, place)}
    settings["MessageTimeout"] = str(message_s)
    lines = [f"{key}={value}" for key, value in {**settings, **shape.settings}.items()]
    return "\n".join([*lines, *_nodes(shape, place), *_partitions(shape)]) + "\n"


def _daemons(shape: Shape, place: Place) -> dict[str, str]:
    host = "head" if shape.namespaces else "localhost"
    return {
        "ClusterName": "lab",
        "SlurmctldHost": f"{host}({shape.address('head')})",
        "SlurmctldPort": str(port(place, "slurmctld")),
        "SlurmdPort": str(place.port + _FIRST_NODE),
        "SlurmUser": place.user,
        "SlurmdUser": place.user,
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={place.munge},cred_expire=5",
        "CredType": "cred/munge",
        "StateSaveLocation": str(place.root / "state"),
        "SlurmdSpoolDir": str(place.run / "spool-%n"),
        "SlurmctldPidFile": str(place.run / "slurmctld.pid"),
        "SlurmdPidFile": str(place.run / "slurmd-%n.pid"),
        "SlurmctldLogFile": str(place.logs / "slurmctld.log"),
        "SlurmdLogFile": str(place.logs / "slurmd-%n.log"),
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "ReturnToService": "2",
        "SlurmdParameters": "config_overrides",
    }


def _scheduling(shape: Shape) -> dict[str, str]:
    return {
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": "100",
        "GresTypes": "gpu",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0,"
        "preempt_youngest_first",
        "PriorityType": "priority/basic",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": shape.preempt.value,
        "JobRequeue": "1",
    }


def _patience(shape: Shape) -> dict[str, str]:
    return {
        "SlurmctldTimeout": "10",
        "SlurmdTimeout": str(shape.node_timeout_s),
        "BatchStartTimeout": "60",
        "InactiveLimit": "0",
        "KillWait": str(shape.kill_wait_s),
        "OverTimeLimit": "0",
        "CompleteWait": "0",
        "MinJobAge": "300",
        "UnkillableStepTimeout": "30",
    }


def _accounting(shape: Shape, place: Place) -> dict[str, str]:
    if not shape.accounting:
        return {"AccountingStorageType": "accounting_storage/none", "JobAcctGatherType": "jobacct_gather/none"}
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": shape.address("head"),
        "AccountingStoragePort": str(port(place, "slurmdbd")),
        "AccountingStoragePass": str(place.munge),
        "AccountingStorageTRES": "gres/gpu",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=5",
    }


def _nodes(shape: Shape, place: Place) -> list[str]:
    lines = []
    for index, (node, gpus) in enumerate(zip(shape.nodes, shape.gpus, strict=True), start=1):
        words = [
            f"NodeName={node}",
            f"NodeHostname={node if shape.namespaces else 'localhost'}",
            f"NodeAddr={shape.address(node)}",
            f"Port={place.port + _FIRST_NODE + index}",
            f"CPUs={shape.cpus}",
            f"RealMemory={shape.memory_mb}",
            *([f"Gres=gpu:{gpus}"] if gpus else []),
            "State=UNKNOWN",
        ]
        lines.append(" ".join(words))
    return lines


def _partitions(shape: Shape) -> list[str]:
    """Jobs of `main` preempt jobs of `backfill`; `phys` is for one account's members."""
    nodes = ",".join(shape.nodes)
    low = f"PriorityTier=1 PreemptMode={shape.preempt.value} GraceTime={shape.grace_s}"
    return [
        f"PartitionName=backfill Nodes={nodes} Default=YES {low} MaxTime=INFINITE State=UP",
        f"PartitionName=main Nodes={nodes} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP",
        f"PartitionName=phys Nodes={nodes} {low} AllowAccounts=phys MaxTime=INFINITE State=UP",
    ]


def gres_conf(shape: Shape, place: Place) -> str:
    lines = ["AutoDetect=off"]
    for node, gpus in zip(shape.nodes, shape.gpus, strict=True):
        if gpus:
            kind, _, count = gpus.rpartition(":")
            which = "0" if count == "1" else f"[0-{int(count) - 1}]"
            lines.append(f"NodeName={node} Name=gpu Type={kind} File={place.root}/dev/nvidia{which}")
    return "\n".join(lines) + "\n"


def cgroup_conf(place: Place) -> str:
    """slurmd 22.05 requires a cgroup plugin, although it uses no cgroup. The plugin for cgroup v1 accepts a missing
    mount point.
    """
    lines = ["CgroupPlugin=cgroup/v1", "CgroupAutomount=no", f"CgroupMountpoint={place.run}/no-cgroup"]
    return "\n".join(lines) + "\n"


def hosts(shape: Shape) -> str:
    lines = ["127.0.0.1 localhost", *(f"{shape.address(machine)} {machine}" for machine in ("head", *shape.nodes))]
    return "\n".join(lines) + "\n"


def slurmdbd_conf(shape: Shape, place: Place) -> str:
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={place.munge}",
        "DbdHost": "head" if shape.namespaces else "localhost",
        "DbdAddr": shape.address("head"),
        "DbdPort": str(port(place, "slurmdbd")),
        "SlurmUser": place.user,
        "LogFile": str(place.logs / "slurmdbd.log"),
        "PidFile": str(place.run / "slurmdbd.pid"),
        "DebugLevel": "info",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": str(port(place, "mariadb")),
        "StorageUser": "root",
        "StoragePass": "none",
        "StorageLoc": "slurm_acct_db",
    }
    return "\n".join(f"{key}={value}" for key, value in settings.items()) + "\n"


def commands(shape: Shape, place: Place, machine: str) -> dict[str, list[str]]:
    if machine != "head":
        return {"slurmd": ["slurmd", "-D", "-f", str(place.daemons_conf), "-N", machine]}
    found = {
        "munged": [
            "munged", "-F", f"--socket={place.munge}", f"--key-file={place.conf.parent}/munge.key",
            f"--log-file={place.logs}/munged.log", f"--pid-file={place.run}/munged.pid",
            f"--seed-file={place.run}/munged.seed",
        ],
        "slurmctld": ["slurmctld", "-D", "-f", str(place.daemons_conf)],
    }  # fmt: skip
    if shape.accounting:
        found["slurmdbd"] = ["slurmdbd", "-D"]
        found["mariadb"] = [
            "mariadbd", "--no-defaults", f"--user={place.user}", f"--datadir={place.root}/db",
            f"--socket={place.run}/db.sock", f"--pid-file={place.run}/db.pid", f"--port={port(place, 'mariadb')}",
            "--bind-address=127.0.0.1", "--skip-grant-tables", "--skip-log-bin", "--performance-schema=0",
            "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0",
        ]  # fmt: skip
    return found
