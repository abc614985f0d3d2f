"""Studies: scenarios from files are simulated in processes, measured and plotted."""
