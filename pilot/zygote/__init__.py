"""The zygote: a single-threaded process that has imported libraries' modules, and forks libraries."""
