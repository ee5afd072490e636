"""One build of the native helper for all tests here, made from the sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from farspark.native import HostflagLibrary, HostPage, load
from farspark.native.build import compile_library

REPLY_BYTES = 256


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostflagLibrary:
    return load(compile_library(tmp_path_factory.mktemp("native") / "libhostflag.so"))


@pytest.fixture
def page(library: HostflagLibrary) -> Iterator[HostPage]:
    with HostPage.create(library, REPLY_BYTES) as page:
        yield page


@pytest.fixture(scope="session")
def sources() -> Path:
    return Path(__file__).resolve().parents[2] / "src" / "farspark" / "native"
