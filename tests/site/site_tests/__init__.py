"""Tests that prove a site: `stoker doctor SITE.toml --tests`, or `pytest --site SITE.toml tests/site` in a clone.

`plugin` has the options and the page, `promise` the tests' marker, `subject` the sessions on the site, `on_pilot` the
code for pilots.
"""
