"""The `stoker` command. `console` prints, `ask` talks to a session's manager, `main` puts the commands together."""
