"""Fake `sbatch`, `squeue`, `scancel`, `scontrol` and `sacct` of Slurm 22.05 over a folder of jobs."""

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import time

FOLDER = os.environ["FAKE_SLURM"]
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY")


def main():
    name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
    log(name, arguments)
    fault = read(f"{name}.fault") or {}
    if fault.get("hang") == "before":
        hang()
    if "code" in fault:
        sys.stderr.write(fault.get("err", "") + "\n")
        return fault["code"]
    if "before" in fault:
        print(fault["before"])
    with open(os.path.join(FOLDER, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if "silent" in fault else sys.stdout):
            code = COMMANDS[name](arguments)
    if "after" in fault:
        print(fault["after"])
    sys.stdout.flush()
    if fault.get("hang") == "after":
        hang()
    while fault.get("held") and read(f"{name}.fault"):
        time.sleep(0.05)
    return code


def sbatch(arguments):
    """Read the #SBATCH lines before a script's first command, as Slurm does."""
    script = arguments[-1]
    said = {}
    with open(script, errors="surrogateescape") as file:
        lines = file.readlines()
    for line in lines:
        found = re.match(r"#SBATCH --([a-z-]+)(?:=(.*))?$", line.rstrip("\n"))
        if found:
            said[found[1]] = found[2] or ""
        elif line.strip() and not line.startswith("#"):
            break
    if said.get("partition") == "nope":
        sys.stderr.write(
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n"
        )
        return 1
    number = len(jobs()) + 101
    job = {
        "id": str(number),
        "name": said.get("job-name", script),
        "state": "PENDING",
        "reason": "Priority",
        "head": said,
        "folder": os.getcwd(),
    }
    if os.path.exists(os.path.join(FOLDER, "runs")):
        job |= {"state": "RUNNING", "reason": "None", "nodes": "n1", "pid": start(number, script, said)}
    write(f"job-{number}.json", job)
    print(f"Submitted batch job {number}")
    return 0


def start(number, script, said):
    import subprocess  # few commands need this module, whose import is slow

    out, err = said.get("output", "slurm.out"), said.get("error", "slurm.err")
    shell = f'bash "$1" >>"$2" 2>>"$3" </dev/null; echo $? >"{FOLDER}/exit-{number}"'
    environ = {**os.environ, "SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "n1"}
    words = ["bash", "-c", shell, "job", os.path.abspath(script), out, err]
    return subprocess.Popen(words, start_new_session=True, env=environ, stdout=subprocess.DEVNULL).pid


def squeue(arguments):
    shape = next(word.partition("=")[2] for word in arguments if word.startswith("--format="))
    for job in jobs():
        line = shape
        fields = {"F": "id", "T": "state", "r": "reason", "S": "start", "N": "nodes", "j": "name", "Z": "folder"}
        for letter, key in fields.items():
            line = line.replace(
                f"%{letter}", job.get(key) or ("N/A" if letter == "S" else "None" if letter == "r" else "")
            )
        if not job.get("forgotten"):
            print(line)
    return 0


def scancel(arguments):
    for job in jobs():
        if {job["id"], f"--name={job.get('name')}"} & set(arguments) and job["state"] not in ENDS:
            if job.get("pid"):
                try:
                    os.killpg(job["pid"], signal.SIGTERM)
                except ProcessLookupError:
                    pass
            write(f"job-{job['id']}.json", {**job, "state": "CANCELLED", "reason": "None"})
    return 0


def scontrol(arguments):
    known = False
    for job in jobs():
        if arguments[-1] in ("-o", job["id"]) and job.get("forgotten") != "everywhere":
            print(
                f"JobId={job['id']} JobName={job['name']} UserId=ana(1000) JobState={job['state']} "
                f"Reason={job.get('reason', 'None')} ExitCode={job.get('exit_code', '0:0')} "
                f"NodeList={job.get('nodes', '(null)')}"
            )
            known = True
    if not known:
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
    return 0 if known else 1


def sacct(arguments):
    if (read("sacct.fault") or {}).get("before"):
        return 0
    sys.stderr.write("Slurm accounting storage is disabled\n")
    return 1


COMMANDS = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol, "sacct": sacct}


def jobs():
    found = []
    for name in sorted(os.listdir(FOLDER)):
        if name.startswith("job-"):
            job = read(name)
            done = os.path.join(FOLDER, f"exit-{job['id']}")
            if job["state"] == "RUNNING" and job.get("pid") and os.path.exists(done):
                with open(done) as file:
                    code = file.read().strip() or "0"
                job |= {"state": "COMPLETED" if code == "0" else "FAILED", "exit_code": f"{code}:0"}
                write(name, job)
            found.append(job)
    return found


def read(name):
    try:
        with open(os.path.join(FOLDER, name)) as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def write(name, value):
    draft = os.path.join(FOLDER, f".{name}.{os.getpid()}")
    with open(draft, "w") as file:
        json.dump(value, file)
    os.replace(draft, os.path.join(FOLDER, name))


def log(name, arguments):
    with open(os.path.join(FOLDER, "commands.log"), "a") as file:
        file.write(json.dumps([time.time(), name, arguments]) + "\n")


def hang():
    import subprocess

    write(f"hangs-{os.getpid()}", os.getpgrp())
    subprocess.run(["sleep", "600"], check=False)


if __name__ == "__main__":
    sys.exit(main())
