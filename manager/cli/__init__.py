"""The `stoker` command: one module per subcommand. `console` prints all output; `ask` sends questions to a manager."""
