"""Marks that are not run by default say why, two lanes where tests run in parallel, fixtures that several rooms use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


# Where the tests of real engines are.
ENGINES = ("tests/vllm/", "tests/engine/vllm/test_overlay.py", "packages/vllm-cpu-engine/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`: real engines one after the other in one lane, all else in another, so that networks of tests and what takes
    whole cores never meet their like."""
    from xdist.scheduler import LoadScopeScheduling

    class TwoLanes(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if nodeid.startswith(ENGINES) else "others"

    return TwoLanes(config, log)


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
