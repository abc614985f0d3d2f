"""Tests that prove a site: `stoker doctor SITE.toml --tests`, or `pytest --site SITE.toml tests/site` in a clone.

`plugin` has the options and the page, `promise` the marker of tests, `subject` the sessions on the site, and
`on_pilot` the code that runs there.
"""
