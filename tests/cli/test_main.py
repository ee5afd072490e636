from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from farspark import __version__
from farspark.cli import main as module
from farspark.cli.main import main
from farspark.errors import CheckpointError, ConfigError, TransportError


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"farspark {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["worker"], ["worker", "x", "--slots", "many"], ["identity", "--jsn"]]
)
def test_wrong_usage_leaves_with_2_and_says_how(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert "usage: farspark" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["worker", "identity"])
def test_every_option_has_a_help_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for action in _parser_of(command)._actions:
        assert action.help, action.dest
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert "usage: farspark" in capsys.readouterr().out


def test_no_default_is_shown_that_is_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: 4096)" in said
    assert "default: None" not in said
    assert "default: False" not in said


def _parser_of(command: str) -> argparse.ArgumentParser:
    for action in module.make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[command]
            assert isinstance(parser, argparse.ArgumentParser)
            return parser
    raise AssertionError("no commands")


def failing(error: BaseException) -> types.ModuleType:
    """A command `fail` that raises."""
    command = types.ModuleType("farspark.cli.fail")

    def run(_: argparse.Namespace) -> int:
        raise error

    def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        subparsers.add_parser("fail").set_defaults(run=run)

    command.add_parser = add_parser  # type: ignore[attr-defined]
    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("--slots 0: expected 1"), 2, "farspark: --slots 0: expected 1\n"),
        (CheckpointError("no config.json"), 2, "farspark: no config.json\n"),
        (TransportError("gone"), 1, "farspark: gone\n"),
        (TimeoutError("late"), 1, "farspark: late\n"),
        (KeyboardInterrupt(), 130, "farspark: interrupted\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            2,
            "farspark: this command needs torch, which is not installed: pip install 'farspark[worker]'\n",
        ),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "farspark.cli.fail", failing(error))
    monkeypatch.setattr(module, "COMMANDS", ("fail",))
    assert main(["fail"]) == code
    assert capsys.readouterr().err == said


def test_ctrl_c_while_the_commands_are_imported_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        raise KeyboardInterrupt

    command = types.ModuleType("farspark.cli.fail")
    command.add_parser = interrupted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "farspark.cli.fail", command)
    monkeypatch.setattr(module, "COMMANDS", ("fail",))
    assert main(["fail"]) == 130
    assert capsys.readouterr().err == "farspark: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ZeroDivisionError("a bug"), ModuleNotFoundError("No module named 'ours'", name="ours")):
        monkeypatch.setitem(sys.modules, "farspark.cli.fail", failing(error))
        monkeypatch.setattr(module, "COMMANDS", ("fail",))
        with pytest.raises(type(error)):
            main(["fail"])


def test_help_and_version_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from farspark.cli.main import make_parser; make_parser(); "
        "sys.exit(','.join({'torch', 'numpy', 'vllm', 'rich'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "farspark", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"farspark {__version__}\n")


def farspark(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farspark", *arguments], stderr=subprocess.PIPE, text=True, check=False, **options
    )


@pytest.mark.parametrize("arguments", [["check", "--list"], ["run", "--explain", "A.env"]])
def test_a_reader_that_has_had_enough_ends_a_command_without_a_word(arguments: list[str], tmp_path: Path) -> None:
    """As `farspark check --list | head -1`."""
    (tmp_path / "A.env").write_text("VLLM_DSPARK_REMOTE=\n")
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = farspark(*arguments, stdout=write_end, cwd=tmp_path)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_disk_without_room_for_the_output_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = farspark("check", "--list", stdout=full)
    assert (done.returncode, done.stderr) == (1, "farspark: cannot write: No space left on device\n")


@pytest.mark.parametrize(
    ("streams", "arguments", "code", "said"),
    [
        ("<&-", ["check", "failure"], 2, "nobody is there to ask"),
        (">&-", ["stats", "stats.json"], 0, ""),
        (">&-", ["stats", "none.json"], 2, "stats file none.json"),
        ("2>&-", ["stats", "stats.json"], 0, "rounds  7"),
        ("2>&-", ["stats", "none.json"], 2, ""),
        ("2>/dev/full", ["stats", "none.json"], 2, ""),
        (">/dev/full 2>/dev/full", ["stats", "stats.json"], 1, ""),
    ],
)
def test_a_stream_that_takes_nothing_changes_no_exit_code_and_no_other_stream(
    streams: str, arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    """As a script or a service may start a command."""
    for name in ("stats.json", "farspark-stats-1.json"):
        (tmp_path / name).write_text('{"rounds": 7}')
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "farspark", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert bool(said) == bool(done.stdout)


def test_a_terminal_that_has_no_such_letters_gets_others() -> None:
    """A help text has an ellipsis, an error the caller's own words."""
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = farspark("probe", "--help", stdout=subprocess.PIPE, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ucx://\\u2026" in done.stdout


def test_no_command_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry in the password database, as containers have, and no HOME."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
