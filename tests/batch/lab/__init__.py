"""Run a real Slurm on this machine: munged, slurmctld and slurmd start in a second and leave nothing."""
