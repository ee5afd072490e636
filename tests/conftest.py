"""Marks that are not run by default say why; fixtures that several rooms use."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

# A test's time says something about the machine, never about the code.
hypothesis.settings.register_profile("farspark", deadline=None)
hypothesis.settings.load_profile("farspark")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests of more than ten seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products as small as the tests' only lose by waiting for a second thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
