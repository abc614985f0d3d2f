"""The `stoker` command, a module per command (`main` lists them). `console` prints, `ask` asks a session's manager."""
