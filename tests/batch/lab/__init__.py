"""A real Slurm on this machine: munged, slurmctld and several slurmd, up in a second, removed without a trace."""
