"""Tests marked `net` are skipped, with the reason, where a machine cannot have network namespaces."""

from __future__ import annotations

import pytest
from tests.net.hosts import why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("net")]
    if marked and (reason := why_not()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
