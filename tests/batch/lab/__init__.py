"""A real Slurm on this machine: munged, slurmctld and slurmd start in a second and are removed completely."""
