from __future__ import annotations

from pathlib import Path

import pytest

from farspark.errors import ConfigError
from farspark.token_file import read_token

TOKEN = "0123456789abcdef0123456789abcdef"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_token_is_the_files_text_without_the_white_space_around_it(tmp_path: Path) -> None:
    assert read_token(written(tmp_path / "token", f"  {TOKEN}\n"), "--token-file") == TOKEN.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o777])
def test_a_file_that_others_can_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--token-file='.*token': others may .*{mode:04o}.*chmod 600"):
        read_token(written(tmp_path / "token", TOKEN, mode), "--token-file")


@pytest.mark.parametrize(("text", "size"), [("", "0"), ("short", "5"), (" " * 40, "0"), ("x" * 5000, "more than 4096")])
def test_a_token_of_another_size_is_refused(tmp_path: Path, text: str, size: str) -> None:
    with pytest.raises(ConfigError, match=f"a token of {size} bytes, expected 16 to 4096"):
        read_token(written(tmp_path / "token", text), "X")


def test_what_is_no_file_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"X='.*none': cannot be read \(No such file"):
        read_token(tmp_path / "none", "X")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path, "X")
    with pytest.raises(ConfigError, match="not a file"):
        read_token(Path("/dev/null"), "X")
