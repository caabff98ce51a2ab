"""pytest's door stands in harness/plugin.py, so that other repositories can use it too; here is what only this house adds."""

import gc

import pytest

pytest_plugins = ["harness.plugin"]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what is loaded and collected out of later collections of garbage, of which every run of a case does some."""
    gc.freeze()
