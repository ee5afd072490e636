"""That Python and ucx_channel.h agree, and where UCX is looked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.transport.ucx import needs_ucx

from farspark.native import ucx
from farspark.native.build import UCXCHANNEL, NativeUnavailable
from farspark.native.ucx import load_ucx
from farspark.transport.ucx import _Status


def test_python_and_the_header_agree(sources: Path) -> None:
    header = (sources / "ucx_channel.h").read_text()
    assert f"#define UCXCHANNEL_VERSION {UCXCHANNEL.version}u" in header
    assert f"#define UCXCHANNEL_HOST_BYTES {ucx.HOST_BYTES}u" in header
    names = {name: int(value) for name, value in re.findall(r"UCXCHANNEL_([A-Z_]+) = (-?\d+)", header)}
    assert names == {member.name: member.value for member in _Status}


@needs_ucx
def test_every_function_of_the_header_is_declared(sources: Path) -> None:
    functions = re.findall(
        r"^UCXCHANNEL_API [^;(]*?(ucxchannel_\w+)\(", (sources / "ucx_channel.h").read_text(), re.MULTILINE
    )
    assert len(functions) > 20
    calls = load_ucx().calls
    for name in functions:
        assert getattr(calls, name).argtypes is not None or name in ("ucxchannel_version", "ucxchannel_build"), name


@needs_ucx
def test_the_ucx_that_is_loaded_says_its_version_and_what_it_was_built_with() -> None:
    library = load_ucx()
    assert library.release >= (1, 13)
    assert str(library) == f"UCX {library.version} from {library.path}"
    assert library.path.name.startswith("libucp")
    assert load_ucx(str(library.path.parent)).path == library.path


@needs_ucx
def test_loading_it_leaves_the_environment_as_it_was_but_for_one_setting() -> None:
    ask = (
        "import os; before = dict(os.environ); from farspark.native.ucx import load_ucx; load_ucx(); "
        "print({name for name in os.environ if os.environ[name] != before.get(name)})"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("{'UCX_CM_REUSEADDR'}", "set()")


def test_a_named_directory_comes_first_and_alone_then_the_system_then_hpcx_then_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(folder: str, name: str) -> Path:
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    hpcx = place("hpcx/lib", "libucp.so.0")
    nixl = place("site/nixl_cu12.libs", "libucp-1a2b.so.0.0.0")
    wheel = place("site/libucx/lib", "libucp.so.0")
    named = place("named", "libucp.so.0")
    monkeypatch.setenv("HPCX_UCX_DIR", str(tmp_path / "hpcx"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "absent")])
    found = [one for one in ucx._candidates(None) if str(one).startswith(str(tmp_path)) or isinstance(one, str)]
    assert found == ["libucp.so.0", hpcx, nixl, wheel]
    assert list(ucx._candidates(tmp_path / "named")) == [named]


def test_without_any_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "_loaded_libucp", lambda: None)
    monkeypatch.setattr(ucx, "_candidates", lambda directory: iter(["libno-such-ucp.so.0"]))
    with pytest.raises(
        NativeUnavailable, match=r"no UCX on this machine: libno-such-ucp\.so\.0: .*libucx0, which has RDMA"
    ):
        ucx._load_libucp(None)
