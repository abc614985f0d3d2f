"""The `stoker` command: a module per subcommand. `console` prints, `ask` questions a manager."""
