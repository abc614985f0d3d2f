"""The `stoker` command: one module per subcommand. `console` prints output; `ask` queries a manager."""
