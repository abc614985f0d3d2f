"""A real Slurm on this machine, for tests: munged, slurmctld and several slurmd, up in a second, gone without a trace.

    with Cluster(Shape(gpus=("a10:2", "titanx:1"))) as cluster:
        job = cluster.submit("echo $CUDA_VISIBLE_DEVICES", "--gres=gpu:a10:2")
        cluster.wait(job, "COMPLETED")

`shape` says what a cluster is like, `texts` what its configuration says. `machine` is the process below which stays all
that a machine ever starts, `handle` is how it is held; `network` connects those that have networks of their own.
`cluster` puts them together, `commands` speaks to Slurm, `needs` says what is missing here.
"""
