"""Where the native helper comes from, and what is refused."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from farspark.native import Call, HostflagLibrary, How, NativeUnavailable, Status, load
from farspark.native.build import compile_library, source_digest
from farspark.native.loader import VERSION
from farspark.native.page import EVENTS, FAR

# Says where a library came from; run in a process of its own, since a loaded library stays loaded.
ASK = "from farspark.native import load; library = load(); print(library.origin, library.path)"


@pytest.fixture
def package(sources: Path, tmp_path: Path) -> Path:
    """A copy of what the helper needs of the package, as in a wheel: without a build."""
    root = tmp_path / "site" / "farspark"
    shutil.copytree(sources, root / "native", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("__init__.py", "errors.py"):
        shutil.copy(sources.parent / name, root / name)
    return root.parent


def run(package: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"] if path is None else path,
        "PYTHONPATH": str(package),
        "XDG_CACHE_HOME": str(package / "cache"),
        "TMPDIR": str(package),
    }
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, timeout=120)


def ask(package: Path, path: str | None = None) -> tuple[str, Path]:
    done = run(package, "-c", ASK, path=path)
    assert done.returncode == 0, done.stderr
    origin, _, file = done.stdout.strip().partition(" ")
    return origin, Path(file)


def variant(sources: Path, directory: Path, old: str, new: str) -> Path:
    """A build of changed sources."""
    text = (sources / "hostflag.h").read_text()
    assert old in text
    (directory / "hostflag.h").write_text(text.replace(old, new))
    (directory / "hostflag.c").write_text((sources / "hostflag.c").read_text())
    library = directory / "libother.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-pthread", str(directory / "hostflag.c"), "-o", str(library)], check=True
    )
    return library


def test_it_is_compiled_at_first_use_into_a_private_directory_and_found_there_after(package: Path) -> None:
    origin, file = ask(package)
    assert (origin, file.parent) == ("compiled", package / "cache" / "farspark" / "native")
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert ask(package, path="") == ("cached", file)


def test_a_build_beside_the_sources_comes_first_unless_it_is_of_other_sources(package: Path) -> None:
    done = run(package, "-m", "farspark.native", "hostflag")
    packaged = package / "farspark" / "native" / "libhostflag.so"
    assert (done.returncode, done.stdout.strip()) == (0, str(packaged))
    assert ask(package, path="") == ("packaged", packaged)
    with (package / "farspark" / "native" / "hostflag.c").open("a") as source:
        source.write("/* changed */\n")
    assert ask(package)[0] == "compiled"
    done = run(package, "-c", ASK, path="")
    assert done.returncode == 0  # what was compiled just now
    assert done.stdout.startswith("cached")


def test_with_no_build_and_no_compiler_the_error_says_all_that_was_tried(package: Path) -> None:
    done = run(package, "-c", ASK, path="")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert "NativeUnavailable: the native helper is not available" in message
    assert "libhostflag.so does not exist" in message
    assert message.count("no C compiler on the PATH (cc, gcc, clang)") == 2
    assert "Install a C compiler" in message


def test_a_compiler_that_fails_is_quoted(package: Path) -> None:
    (package / "farspark" / "native" / "hostflag.c").write_text("#error no such machine\n")
    done = run(package, "-c", ASK)
    assert done.returncode == 1
    assert "no such machine" in done.stderr
    done = run(package, "-m", "farspark.native", "hostflag", "out.so")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "no such machine" in done.stderr
    assert not (package / "out.so").exists()


def test_what_a_compiler_says_may_be_in_another_encoding(package: Path) -> None:
    compiler = package / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'f\\374r diese Maschine nicht' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run(package, "-X", "utf8", "-c", ASK, path=str(package))
    assert done.returncode == 1
    assert "NativeUnavailable: the native helper is not available" in done.stderr
    assert "diese Maschine nicht" in done.stderr


def test_a_cache_that_others_may_write_to_is_left_alone(package: Path) -> None:
    cache = package / "cache" / "farspark" / "native"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    origin, file = ask(package)
    assert origin == "compiled"
    assert cache not in file.parents
    assert not file.exists()  # a temporary directory, gone once it was loaded
    assert list(cache.iterdir()) == []
    assert "is not private to this user" in run(package, "-c", ASK, path="").stderr


def test_a_cached_build_that_others_may_write_to_or_that_was_cut_short_is_made_anew(package: Path) -> None:
    _, file = ask(package)
    file.chmod(0o777)
    assert ask(package) == ("compiled", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    whole = file.read_bytes()
    for size in (0, 10, 100, 5000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert ask(package) == ("compiled", file), size
    assert ask(package, path="") == ("cached", file)


def test_a_cache_that_cannot_be_made_does_not_matter(package: Path) -> None:
    (package / "cache").write_text("a file\n")
    assert ask(package)[0] == "compiled"


def test_several_ranks_may_compile_at_the_same_time(package: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(package),
        "XDG_CACHE_HOME": str(package / "cache"),
    }
    ranks = [
        subprocess.Popen([sys.executable, "-P", "-c", ASK], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [rank.communicate(timeout=120)[0].split(" ")[0] for rank in ranks]
    assert set(said) <= {"compiled", "cached"}
    assert len(said) == 4
    assert len(list((package / "cache" / "farspark" / "native").iterdir())) == 1


def test_a_path_that_is_given_is_the_only_one_that_is_tried(library: HostflagLibrary, tmp_path: Path) -> None:
    assert library.origin == "given"
    assert library.build == source_digest()
    with pytest.raises(NativeUnavailable, match=r"missing\.so cannot be loaded"):
        load(tmp_path / "missing.so")
    (tmp_path / "text.so").write_text("no library\n")
    with pytest.raises(NativeUnavailable, match=r"text\.so cannot be loaded"):
        load(tmp_path / "text.so")


def test_a_given_build_of_other_sources_but_this_version_is_taken(sources: Path, tmp_path: Path) -> None:
    assert load(variant(sources, tmp_path, "FARSPARK_HOSTFLAG_H", "FARSPARK_OTHER_H")).build == ""


def test_a_given_build_of_another_version_is_refused(sources: Path, tmp_path: Path) -> None:
    other = variant(sources, tmp_path, f"#define HOSTFLAG_VERSION {VERSION}u", "#define HOSTFLAG_VERSION 999u")
    with pytest.raises(
        NativeUnavailable, match=f"version 999 of the native helper; this Farspark needs version {VERSION}"
    ):
        load(other)


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int other(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "other.c", "-o", tmp_path / "other.so"], check=True)
    with pytest.raises(NativeUnavailable, match="is no build of the native helper"):
        load(tmp_path / "other.so")


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"cannot build in .*absent"):
        compile_library(tmp_path / "absent" / "libhostflag.so")


def test_python_and_the_header_agree(sources: Path) -> None:
    header = (sources / "hostflag.h").read_text()
    assert f"#define HOSTFLAG_VERSION {VERSION}u" in header
    assert f"#define HOSTFLAG_FAR (UINT32_C(1) << {FAR.bit_length() - 1})" in header
    assert f"#define HOSTFLAG_EVENTS {EVENTS}u" in header
    names = {name: int(value) for name, value in re.findall(r"HOSTFLAG_([A-Z_]+) = (-?\d+),", header)}
    calls = {f"CALL_{member.name}": member.value for member in Call}
    assert names == {member.name: member.value for kind in (Status, How) for member in kind} | calls


def test_every_function_of_the_header_is_declared(library: HostflagLibrary, sources: Path) -> None:
    functions = re.findall(r"^HOSTFLAG_API .*?(hostflag_\w+)\(", (sources / "hostflag.h").read_text(), re.MULTILINE)
    assert len(functions) > 20
    for name in functions:
        function = getattr(library.calls, name)
        assert function.argtypes is not None or name in ("hostflag_version", "hostflag_build"), name


def test_the_usage_is_told() -> None:
    done = subprocess.run([sys.executable, "-m", "farspark.native", "--help"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: python -m farspark.native [NAME [FILE]]" in done.stderr
    assert "names: hostflag" in done.stderr
