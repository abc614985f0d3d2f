"""A real Slurm on this machine, for tests: munged, slurmctld and several slurmd, up in a second, gone without a
trace."""
