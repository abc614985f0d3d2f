"""`make gpu`: run the site suite, GPU tests and GPU benchmarks on this machine in eight minutes."""
