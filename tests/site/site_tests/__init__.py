"""Tests that prove a site: `stoker doctor SITE.toml --tests`, or `pytest --site SITE.toml tests/site` in a clone.

`plugin` defines the options and the page, `promise` marks the tests, `subject` provides the sessions, and `on_pilot`
has the code for pilots.
"""
