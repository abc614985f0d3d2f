"""The site suite in a clone: `pytest --site SITE.toml tests/site`. Its tests are the package `stoker.site_tests`."""

from __future__ import annotations

import pytest

_PLUGIN = "stoker.site_tests.plugin"


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.has_plugin(_PLUGIN):
        pluginmanager.import_plugin(_PLUGIN)
