"""`farspark run` as a user runs it: what it prints, what it refuses, and that it becomes the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

R = "VLLM_DSPARK_REMOTE"
IDENTITY = "ab" * 32
TEXT = f"# test\n{R}=tcp://10.0.0.2:18620\n{R}_POLICY=capacity\n{R}_IDENTITY=${{FARSPARK_IDENTITY}}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "test.env"
    path.write_text(TEXT)
    return path


def farspark(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from farspark.cli.main import main; sys.exit(main())"
    environment = {"PATH": os.environ["PATH"], "FARSPARK_IDENTITY": IDENTITY} | environ
    return subprocess.run(
        [sys.executable, "-c", program, "run", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_it_says_what_it_will_do_and_becomes_the_command_with_its_exit_code(config: Path) -> None:
    probe = f"import os; print(os.environ['{R}_POLICY'], os.environ['{R}_IDENTITY']); raise SystemExit(7)"
    done = farspark(config, "--", sys.executable, "-c", probe, "--explain")
    assert done.returncode == 7
    assert done.stderr == ""
    said = done.stdout.splitlines()
    assert said[:4] == [
        f"config      {config}",
        "policy      capacity: no local drafter; the worker's drafts or none",
        "endpoint    tcp://10.0.0.2:18620",
        "identity    abababab…abab, Markov identity not checked",
    ]
    assert said[4].startswith(f"command     {sys.executable} -c 'import os;")
    assert said[5:] == [f"capacity {IDENTITY}"]


def test_the_command_is_the_same_process() -> None:
    shipped = Path(__file__).parents[2] / "configs" / "A-local.env"
    program = "import sys; from farspark.cli.main import main; sys.exit(main())"
    arguments = ["run", str(shipped), "--", sys.executable, "-c", "import os; print(os.getpid())"]
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    assert said.splitlines()[-1] == str(process.pid)
    assert f"policy      none: {R} is not set, vLLM drafts by itself" in said


def test_the_environment_wins_and_that_is_said(config: Path) -> None:
    probe = f"import os; print(os.environ['{R}_POLICY'])"
    done = farspark(config, "--", sys.executable, "-c", probe, **{f"{R}_POLICY": "shadow"})
    assert f"note        the environment's {R}_POLICY wins over {config}:3" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "shadow"


def test_settings_that_a_missing_endpoint_leaves_without_effect_are_named(config: Path) -> None:
    done = farspark(config, "--", "true", **{R: ""})
    assert done.returncode == 0
    assert f"note        without {R} no effect: {R}_IDENTITY, {R}_POLICY" in done.stdout.splitlines()


def test_explain_prints_values_and_origins_and_starts_nothing(config: Path, tmp_path: Path) -> None:
    done = farspark("--explain", config, "--", "touch", tmp_path / "started", **{f"{R}_TRIP": "5"})
    assert (done.returncode, done.stderr) == (0, "")
    rows = {words[0]: (words[1], words[-1]) for words in map(str.split, done.stdout.splitlines())}
    assert rows[R] == ("tcp://10.0.0.2:18620", f"{config}:2")
    assert rows[f"{R}_IDENTITY"] == (IDENTITY, f"{config}:4")
    assert rows[f"{R}_TRIP"] == ("5", "environment")
    assert rows[f"{R}_COOLDOWN"] == ("256", "default")
    assert not (tmp_path / "started").exists()
    assert farspark("--explain", config).returncode == 0


def test_a_dry_run_prints_environment_and_command_for_a_shell_and_starts_nothing(config: Path, tmp_path: Path) -> None:
    done = farspark("--dry-run", config, "--", "touch", tmp_path / "not yet")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"{R}=tcp://10.0.0.2:18620 \\",
        f"{R}_IDENTITY={IDENTITY} \\",
        f"{R}_POLICY=capacity \\",
        f"touch '{tmp_path / 'not yet'}'",
    ]
    assert not (tmp_path / "not yet").exists()
    subprocess.run(["sh", "-c", done.stdout], check=True)
    assert (tmp_path / "not yet").exists()


@pytest.mark.parametrize(
    ("arguments", "environ", "sentence"),
    [
        ([], {}, "there is no command to start"),
        (["--"], {}, "there is no command to start"),
        (["--", "no-such-program-here"], {}, "no-such-program-here is not a program in this PATH"),
        (["--", "true"], {"PATH": "/nonexistent"}, "true is not a program in this PATH"),
        (["--dry-run", "--", "true"], {}, "--dry-run stands after CONFIG.env"),
        (
            ["--", "true"],
            {"VLLM_PLUGINS": "other"},
            "VLLM_PLUGINS='other' (environment) keeps vLLM from loading Farspark",
        ),
        (["--", "true"], {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "selects the V1 model runner"),
        (["--", "true"], {"FARSPARK_IDENTITY": ""}, "needs ${FARSPARK_IDENTITY}, which is not set"),
        (["--", "true"], {f"{R}_TRIP": "x"}, f"{R}_TRIP='x': expected a whole number"),
    ],
)
def test_PLUGIN_LOAD_what_a_person_must_put_right_is_one_sentence_and_exit_code_2(
    arguments: list[str], environ: dict[str, str], sentence: str, config: Path
) -> None:
    done = farspark(config, *arguments, **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("farspark: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_explain_shows_the_values_and_then_refuses(config: Path) -> None:
    done = farspark("--explain", config, VLLM_PLUGINS="other")
    assert done.returncode == 2
    assert f"{R}_COOLDOWN" in done.stdout
    assert "keeps vLLM from loading Farspark" in done.stderr


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.env"
    binary.write_bytes(b"\xff\xfe")
    script = tmp_path / "script"
    script.write_text("no interpreter line")
    script.chmod(0o755)
    (tmp_path / "good.env").write_text("")
    for arguments, sentence in (
        ((tmp_path / "absent.env",), "absent.env cannot be read: No such file"),
        ((binary,), "binary.env is not a text file"),
        ((tmp_path / "good.env", "--", script), "script cannot be started: Exec format error"),
    ):
        done = farspark(*arguments)
        assert done.returncode == 2
        assert sentence in done.stderr


def test_the_token_itself_is_never_printed(config: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of the two sides")
    token.chmod(0o600)
    environ = {f"{R}_TOKEN_FILE": str(token)}
    for options in (("--explain", config), ("--dry-run", config, "--", "true"), (config, "--", "true")):
        done = farspark(*options, **environ)
        assert done.returncode == 0, done.stderr
        assert "secret" not in done.stdout + done.stderr
    assert f"{R}_TOKEN_FILE" in (said := farspark("--explain", config, **environ).stdout)
    assert str(token) in said
    token.chmod(0o644)
    refused = farspark("--explain", config, **environ)
    assert refused.returncode == 2
    assert (
        f"environment: {R}_TOKEN_FILE=" in refused.stderr or f"{R}_TOKEN_FILE={str(token)!r}: others" in refused.stderr
    )
