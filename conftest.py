"""pytest's door stands in harness/plugin.py, so that other repositories can use it too."""

pytest_plugins = ["harness.plugin"]
