"""The zygote: a single-threaded process that imports the libraries' modules once, and forks libraries."""
