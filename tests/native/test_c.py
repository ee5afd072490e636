"""The C tests, as they are and under the sanitizers that the compiler has; `make native-check` runs them at full length."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST = Path(__file__).parent / "hostflag_test.c"
WARNINGS = ["-std=c11", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]
SANITIZERS = {
    "none": ["-O2"],
    "thread": ["-O1", "-fsanitize=thread"],
    "address-undefined": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_c_tests_pass_under(sanitizer: str, sources: Path, tmp_path: Path) -> None:
    flags = SANITIZERS[sanitizer]
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    if subprocess.run(["cc", *flags, str(empty), "-o", str(tmp_path / "empty")], capture_output=True).returncode != 0:
        pytest.skip(f"this compiler has no {' '.join(flags)}")
    program = tmp_path / "hostflag_test"
    subprocess.run(["cc", *WARNINGS, *flags, f"-I{sources}", str(TEST), "-o", str(program)], check=True)
    command = [str(program), "--race", "2000", "--claims", "3000", "--storm", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2000 rounds" in done.stdout


@pytest.mark.slow
def test_make_native_check_passes() -> None:
    subprocess.run(["make", "native-check"], cwd=ROOT, check=True, timeout=900)
