"""Fault types of hardware, network, file systems, nodes and batch systems, in the words of those who report them.

No such fault can be caused on a machine without a GPU: the texts are those that CUDA, NCCL, the kernel, Slurm,
    HTCondor and
OpenSSH print (their sources and documentation), raised or written inside programs that really run.
"""

from __future__ import annotations

from benchmarks.papers.schedmate.failures.injections import (
    BACKWARD,
    C10D,
    INFRASTRUCTURE,
    LINEAR,
    LOGGER,
    SERIAL,
    TORCH_ONLY,
    FaultType,
    Injection,
    coded,
    killed,
    raised,
)

_ASYNC = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might "
    "be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
_NCCL = (
    "torch.distributed.DistBackendError|NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
)


def _cuda(text: str, *prints: str, where: str = "compute", library: tuple[str, str, str] = LINEAR) -> Injection:
    return raised(where, f"torch.AcceleratorError|CUDA error: {text}{_ASYNC}", *library, *prints, only=TORCH_ONLY)


TYPES = tuple(
    FaultType(name, INFRASTRUCTURE, component, injections)
    for name, component, injections in (
    ("gpu_ecc", "gpu", (
        _cuda("uncorrectable ECC error encountered"),
        _cuda("uncorrectable ECC error encountered", "[{clock}] NVRM: Xid (PCI:{bus}): 48, pid={pid}, name=python, "
            "An uncorrectable double bit "
              "error (DBE) has been detected on GPU in the framebuffer at partition 4, subpartition 0.",
              library=BACKWARD),
    )),
    ("gpu_nvlink", "nvlink", (
        _cuda("uncorrectable NVLink error detected during the execution"),
        _cuda("uncorrectable NVLink error detected during the execution", "[{clock}] NVRM: Xid (PCI:{bus}): 74, "
            "pid='<unknown>', name=<unknown>, "
              "NVLink: fatal error detected on link 3(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", where="sync",
              library=C10D),
    )),
    ("gpu_off_the_bus", "gpu", (
        _cuda("unknown error", "[{clock}] NVRM: Xid (PCI:{bus}): 79, pid={pid}, GPU has fallen off the bus.",
              "[{clock}] NVRM: GPU {bus}: GPU has fallen off the bus."),
        raised("compute", "RuntimeError|Unable to determine the device handle for gpu {bus}: GPU is lost.  Reboot "
            "the system to recover this GPU",
               "pynvml.py", "_nvmlCheckReturn", "raise NVMLError(ret)"),
    )),
    ("gpu_gsp_timeout", "gpu", (
        _cuda("unspecified launch failure", "[{clock}] NVRM: Xid (PCI:{bus}): 119, pid={pid}, name=python, Timeout "
            "after 6s of waiting for RPC "
              "response from GPU{gpu} GSP! Expected function 76 (GSP_RM_CONTROL).", "[{clock}] NVRM: GPU{gpu} GSP "
              "RPC buffer contains function"),
    )),
    ("gpu_unavailable", "gpu", (
        raised("start", "RuntimeError|CUDA unknown error - this may be due to an incorrectly set up environment, "
            "e.g. changing env variable "
               "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero.",
               "torch/cuda/__init__.py", "_lazy_init",
               "torch._C._cuda_init()", only=TORCH_ONLY),
        _cuda("CUDA-capable device(s) is/are busy or unavailable", where="start"),
        killed("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
            "latest NVIDIA driver is installed "
               "and running.", where="start"),
    )),
    ("cuda_oom_neighbour", "gpu_memory", (
        raised("start", "torch.OutOfMemoryError|CUDA out of memory. Tried to allocate 256.00 MiB. GPU {gpu} has a "
            "total capacity of 39.39 GiB of which "
               "91.56 MiB is free. Process {pid} has 36.40 GiB memory in use. Including non-PyTorch memory, this "
               "process has 2.89 GiB memory in "
               "use. Of the allocated memory 2.41 GiB is allocated by PyTorch, and 12.5 MiB is reserved by PyTorch "
               "but unallocated.",
               "torch/nn/modules/module.py", "convert", "return t.to(", only=TORCH_ONLY),
    )),
    ("nccl_system_error", "network", (
        raised("sync", _NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
            "2.21.5\nncclSystemError: System call "
               "(e.g. socket, malloc) or external library call failed or device error. \nLast "
               "error:\nsocketStartConnect: Connect to "
               "10.3.7.41<45521> failed : Software caused connection abort", *LOGGER, only=TORCH_ONLY),
    )),
    ("nccl_timeout", "network", (
        raised("sync", "torch.distributed.DistBackendError|[Rank {rank}] Collective WorkNCCL(SeqNum=1834, "
            "OpType=ALLREDUCE, NumelIn=16777216, "
               "NumelOut=16777216, Timeout(ms)=1800000) ran for 1800034 milliseconds before timing out.", *C10D,
               "[rank{rank}]:[E1126 05:11:27.117 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
               "collective operation timeout: WorkNCCL("
               "SeqNum=1834, OpType=ALLREDUCE, NumelIn=16777216, NumelOut=16777216, Timeout(ms)=1800000) ran for "
               "1800034 milliseconds before "
               "timing out.", only=TORCH_ONLY),
    )),
    ("infiniband", "network", (
        raised("sync", _NCCL + "remote process exited or there was a network error, NCCL version "
            "2.21.5\nncclRemoteError: A call failed possibly due "
               "to a network error or a remote process exiting prematurely.\nLast error:\nNET/IB : Got completion "
               "from peer 10.3.7.12<51234> with "
               "status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fe80::e42:a1ff remoteGids fe80::ba59", *LOGGER,
               "{host}:{pid}:{pid} [{gpu}] transport/net_ib.cc:1295 NCCL WARN NET/IB : mlx5_2:1 Got async event : "
               "port error", only=TORCH_ONLY),
        killed("[{clock}] mlx5_core 0000:5e:00.0 ibs4f0: Port: 1 Link DOWN", "{host}:{pid}:{pid} [{gpu}] "
            "transport/net_ib.cc:1295 NCCL WARN NET/IB : "
               "mlx5_2:1 Got async event : port error", where="sync"),
    )),
    ("no_route", "network", (
        raised("sync", "OSError:113", "socket.py", "create_connection", "sock.connect(sa)"),
        raised("start", "torch.distributed.DistNetworkError|The client socket has failed to connect to any network "
            "address of ({host}, 29500). The "
               "client socket has failed to connect to {host}:29500 (errno: 113 - No route to host).",
               "torch/distributed/rendezvous.py",
               "_create_c10d_store", "return TCPStore(", only=TORCH_ONLY),
    )),
    ("dns", "network", (
        raised("start", "socket.gaierror:-3", "socket.py", "getaddrinfo", "for res in _socket.getaddrinfo(host, "
            "port, family, type, proto, flags):"),
        killed("srun: error: get_addr_info: getaddrinfo() failed: Name or service not known", "srun: error: "
            "slurm_set_addr: Unable to resolve "
               "\"{host}\"", "srun: error: fwd_tree_thread: can't find address for host {host}, check slurm.conf",
               where="start"),
    )),
    ("port_in_use", "network", (
        raised("start", "torch.distributed.DistNetworkError|The server socket has failed to listen on any local "
            "network address. port: 29500, "
               "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
               "torch/distributed/rendezvous.py",
               "_create_c10d_store", "return TCPStore(", only=TORCH_ONLY),
        coded("start", "import socket\na = socket.socket(); a.bind(('127.0.0.1', 0)); a.listen()\nb = "
            "socket.socket(); b.bind(a.getsockname())"),
    )),
    ("ssh_host_key", "network", (
        killed("@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@", "@    WARNING: REMOTE HOST "
            "IDENTIFICATION HAS CHANGED!     @",
               "@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@", "Host key verification failed.",
               where="start"),
        killed("ssh: connect to host {host} port 22: Connection timed out",
            "--------------------------------------------------------------------------",
               "ORTE was unable to reliably start one or more daemons.", where="start"),
    )),
    ("estale", "filesystem", (
        raised("data", "OSError:116:/lustre/{user}/data/train-00017.arrow", "torch/utils/data/_utils/fetch.py", "fetch",
               "data = [self.dataset[idx] for idx in possibly_batched_index]"),
        coded("save", "raise OSError(116, 'Stale file handle', '/nfs/{user}/runs/epoch.pt')"),
    )),
    ("eio", "disk", (
        raised("data", "OSError:5:/scratch/{user}/shard-0003.tar", "tarfile.py", "read", "return "
            "self.fileobj.read(size)"),
        raised("save", "RuntimeError|basic_ios::clear: iostream error: Input/output error", *SERIAL,
               "[{clock}] blk_update_request: I/O error, dev nvme1n1, sector 1876432128 op 0x0:(READ) flags 0x80700",
               only=TORCH_ONLY),
    )),
    ("enospc", "disk", (
        raised("save", "OSError:28:/tmp/ckpt.pt", "shutil.py", "copyfileobj", "fdst_write(buf)"),
        raised("save", "safetensors_rust.SafetensorError|Error while serializing: IoError(Os { code: 28, kind: "
            "StorageFull, message: \"No space left "
               "on device\" })", "safetensors/torch.py", "save_file", "serialize_file(_flatten(tensors), filename, "
               "metadata=metadata)", only="language"),
    )),
    ("file_server_gone", "filesystem", (
        raised("data", "OSError:108:/lustre/{user}/data/part-7.bin", "io.py", "readinto", "return self.raw.readinto(b)",
               "[{clock}] LustreError: 11-0: scratch-OST0011-osc-ffff9c3c: operation ost_read to node "
               "10.3.0.7@o2ib failed: rc = -107",
               "[{clock}] LustreError: 167-0: scratch-OST0011: This client was evicted by scratch-OST0011; in "
               "progress operations using this "
               "service will fail."),
        raised("data", "OSError:107:/mnt/gcs/{user}/data/part-7.bin", "io.py", "readinto", "return "
            "self.raw.readinto(b)"),
        killed("[{clock}] nfs: server nas02 not responding, timed out"),
    )),
    ("object_store", "filesystem", (
        raised("data", "OSError|An error occurred (SlowDown) when calling the GetObject operation (reached max "
            "retries: 4): Please reduce your request "
               "rate.", "s3fs/core.py", "_call_s3", "raise translate_boto_error(err)"),
        raised("save", "OSError|An error occurred (503) when calling the PutObject operation (reached max retries: "
            "4): Service Unavailable",
               "s3fs/core.py", "_call_s3", "raise translate_boto_error(err)"),
    )),
    ("node_failure", "node", (
        killed("slurmstepd: error: *** STEP {job}.0 ON {host} CANCELLED AT 2026-11-26T04:12:09 DUE TO NODE "
            "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
               "srun: error: Node failure on {host}"),
        killed("srun: error: Timed out waiting for job step to complete", "srun: error: Node failure on {host}",
            "slurmstepd: error: *** JOB {job} ON "
               "{host} CANCELLED AT 2026-11-26T04:12:09 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"),
    )),
    ("preemption", "scheduler", (
        killed("slurmstepd: error: *** JOB {job} ON {host} CANCELLED AT 2026-11-26T04:12:09 DUE TO PREEMPTION ***"),
        killed("004 ({job}.000.000) 2026-11-26 04:12:09 Job was evicted.", "\t(0) Job terminated and was not "
            "checkpointed"),
    )),
    ("walltime", "scheduler", (
        killed("slurmstepd: error: *** JOB {job} ON {host} CANCELLED AT 2026-11-26T04:12:09 DUE TO TIME LIMIT ***"),
        killed("slurmstepd: error: *** STEP {job}.0 ON {host} CANCELLED AT 2026-11-26T04:12:09 DUE TO TIME LIMIT ***"),
    )),
    ("hardware_check", "node", (
        killed("[{clock}] mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 1: bd80000000100134",
            "[{clock}] mce: [Hardware Error]: "
               "Machine check events logged", "Bus error (core dumped)"),
        killed("Message from syslogd@{host} at Nov 26 04:12:09 ...", " kernel:[{clock}] watchdog: BUG: soft lockup "
            "- CPU#17 stuck for 23s! [python:{pid}]"),
    )),
    ("node_out_of_memory", "memory", (
        killed("[{clock}] java invoked oom-killer: gfp_mask=0x100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
               "[{clock}] "
               "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/slurm/uid_1042,task=python,"
               "pid={pid},uid=1042", "[{clock}] Out of memory: Killed process {pid} (python) total-vm:28214312kB, "
               "anon-rss:6912340kB", "Killed"),
    )),
    ("batch_services", "scheduler", (
        killed("srun: error: Task launch for StepId={job}.0 failed on node {host}: Invalid job credential", "srun: "
            "error: Application launch failed: "
               "Invalid job credential", where="start"),
        killed("slurmstepd: error: Munge decode failed: Expired credential", "slurmstepd: error: authentication: "
            "Expired credential", where="start"),
        killed("022 ({job}.000.000) 2026-11-26 04:12:09 Job disconnected, attempting to reconnect", "    Socket "
            "between submit and execute hosts closed "
               "unexpectedly", "    Trying to reconnect to slot1@{host}", "024 ({job}.000.000) 2026-11-26 04:32:09 "
               "Job reconnection failed",
               "    Job disconnected too long: JobLeaseDuration (1200 seconds) expired", "    Can not reconnect to "
               "slot1@{host}, rescheduling job"),
    )),
    ("container_start", "node", (
        killed("slurmstepd: error: pyxis: failed to import docker image", "slurmstepd: error: pyxis: [ERROR] Could "
            "not process JSON input: 429 "
               "toomanyrequests", "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed "
               "with rc=-1", where="start"),
        killed("slurmstepd: error: prolog failed: rc:256 output:GPU health check", "srun: error: Task launch for "
            "StepId={job}.0 failed on node {host}: "
               "Job prolog failed", where="start"),
    )),
    ("licence_server", "licence", (
        killed("License checkout failed: Cannot connect to license server system.", "Feature:       "
            "MATLAB_Distrib_Comp_Engine", "FlexNet Licensing "
               "error:-15,570.  System Error: 115 \"Operation now in progress\"", where="start"),
        raised("start", "RuntimeError|gurobipy: Error 10009: Unable to connect to license server 'lic01:41954' "
            "(license manager does not respond)",
               "gurobipy/__init__.py", "start", "self._startenv()"),
    )),
    )
)  # fmt: skip
