"""A fork server: a single-threaded process that has imported what libraries import, and forks one on request."""
