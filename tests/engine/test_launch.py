"""Launch configs: parsing, whose value wins, what is refused, and that the shipped ones hold."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from farspark.engine.config import DEPTH_SETTINGS, SETTINGS, KeepCachedBlocks, Policy
from farspark.engine.launch import Launch, explain, parse_launch, prepare, refuse_unloadable
from farspark.errors import ConfigError

R = "VLLM_DSPARK_REMOTE"
IDENTITY = "ab" * 32
REMOTE = f"{R}=tcp://10.0.0.2:18620\n{R}_IDENTITY={IDENTITY}\n"
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.env"))


def launch(text: str, **environ: str) -> Launch:
    return prepare(parse_launch(text, "x.env"), environ)


def origins(made: Launch) -> dict[str, tuple[str, str]]:
    return {row.name: (row.value, row.origin) for row in explain(made)}


def test_comments_blank_lines_quotes_and_references_are_read() -> None:
    text = "# a comment\n\n A=1 \nB='two # ${A} \"words\"'\nC=\"${HOST}:${PORT}\"\nD=\nE=x=y#z\nF='it'\n"
    made = launch(text, HOST="h", PORT="1")
    assert {name: made.environ[name] for name in "ABCDEF"} == {
        "A": "1",
        "B": 'two # ${A} "words"',
        "C": "h:1",
        "D": "",
        "E": "x=y#z",
        "F": "it",
    }
    assert [made.origins[name] for name in "AB"] == ["x.env:3", "x.env:4"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("export A=1", "is not KEY=VALUE"),
        ("A", "is not KEY=VALUE"),
        ("A = 1", "is not KEY=VALUE"),
        ("1A=1", "is not KEY=VALUE"),
        ("=1", "is not KEY=VALUE"),
        ("A= 1", "space after '='"),
        ("A=1 # one", "has a '#' in its value"),
        ("A='1", "a quote without its match"),
        ('A="1" 2', "a quote without its match"),
        ("A='1'2'", "a quote without its match"),
        ("A='", "a quote without its match"),
        ("A=x\0y", "null character"),
    ],
)
def test_a_malformed_line_is_an_error_with_file_and_line(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^x\.env:3: .*{sentence}"):
        parse_launch(f"B=1\n\n{line}\n", "x.env")


def test_a_name_that_is_set_twice_is_an_error_with_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"^x\.env:3: A is set in x\.env:1 already"):
        parse_launch("A=1\nB=2\nA=1\n", "x.env")


@pytest.mark.parametrize("environ", [{}, {"FARSPARK_IDENTITY": " "}])
def test_a_reference_to_nothing_is_an_error_that_says_what_to_export(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^x\.env:1: A needs \$\{FARSPARK_IDENTITY\}.*export FARSPARK_IDENTITY="):
        launch("A=${FARSPARK_IDENTITY}\n", **environ)


@pytest.mark.parametrize("value", ["${", "${}", "${A", "${A-b}"])
def test_a_reference_that_is_not_a_name_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.env:1: .*expected \$\{NAME\}"):
        launch(f"X={value}\n", A="1")


def test_the_environment_wins_over_the_file_and_what_it_hides_need_not_be_there() -> None:
    made = launch(REMOTE.replace(IDENTITY, "${ABSENT}"), **{f"{R}_IDENTITY": "cd" * 32})
    assert made.config is not None
    assert made.config.identity == bytes.fromhex("cd" * 32)
    assert [one.place for one in made.overridden] == ["x.env:2"]
    assert origins(made)[f"{R}_IDENTITY"] == ("cd" * 32, "environment")


def test_an_empty_variable_in_the_environment_switches_the_remote_off() -> None:
    made = launch(REMOTE, **{R: ""})
    assert made.config is None
    assert made.environ[R] == ""
    assert made.without_effect == (f"{R}_IDENTITY",)


def test_with_the_remote_switched_off_its_settings_need_nothing_from_the_environment() -> None:
    text = f"{R}=${{FARSPARK_ENDPOINT}}\n{R}_IDENTITY=${{FARSPARK_IDENTITY}}\nOTHER=${{ELSE}}\n"
    made = launch(text, **{R: "", "ELSE": "x"})
    assert made.config is None
    assert (made.environ[f"{R}_IDENTITY"], made.environ["OTHER"]) == ("", "x")
    with pytest.raises(ConfigError, match="OTHER needs"):
        launch(text, **{R: ""})


def test_a_bad_setting_is_an_error_with_file_and_line() -> None:
    with pytest.raises(ConfigError, match=rf"^x\.env:3: {R}_POLICY='fast'"):
        launch(REMOTE + f"{R}_POLICY=fast\n")
    with pytest.raises(ConfigError, match=rf"^x\.env:3: {R}_TIMEOUT is not a setting"):
        launch(REMOTE + f"{R}_TIMEOUT=1\n{R}_TIMEOUT_MS=1\n")
    with pytest.raises(ConfigError, match=rf"^environment: {R}_TRIP='x'"):
        launch(REMOTE + f"{R}_TRIP=1\n", **{f"{R}_TRIP": "x"})
    with pytest.raises(ConfigError, match=rf"^{R}_IDENTITY is not set"):
        launch(f"{R}=tcp://h:1\n")


@pytest.mark.parametrize("plugins", ["", "other", "farspark2,other", "other, farspark"])
def test_PLUGIN_LOAD_a_list_of_plugins_without_ours_is_refused(plugins: str) -> None:
    made = launch(REMOTE, VLLM_PLUGINS=plugins)
    with pytest.raises(ConfigError, match=r"VLLM_PLUGINS='.*' \(environment\).*add farspark"):
        refuse_unloadable(made)
    with pytest.raises(ConfigError, match=r"\(x\.env:3\)"):
        refuse_unloadable(launch(REMOTE + f"VLLM_PLUGINS='{plugins}'\n"))


def test_a_list_of_plugins_with_ours_passes_and_without_a_remote_any_does() -> None:
    refuse_unloadable(launch(REMOTE))
    refuse_unloadable(launch(REMOTE, VLLM_PLUGINS="other,farspark"))
    refuse_unloadable(launch("", VLLM_PLUGINS="other"))


@pytest.mark.parametrize("text", ["", REMOTE])
@pytest.mark.parametrize("value", ["0", "false", " No "])
def test_the_v1_runner_is_refused_because_it_has_no_dspark(value: str, text: str) -> None:
    with pytest.raises(ConfigError, match="selects the V1 model runner"):
        refuse_unloadable(launch(text, VLLM_USE_V2_MODEL_RUNNER=value))
    refuse_unloadable(launch(text, VLLM_USE_V2_MODEL_RUNNER="1"))


def test_every_setting_is_explained_with_its_value_and_where_it_came_from() -> None:
    text = REMOTE + f"{R}_TIMEOUT_MS=20\nA=1\nVLLM_USE_V2_MODEL_RUNNER=1\n"
    rows = origins(launch(text, **{f"{R}_TRIP": "7", "PATH": "/bin", "VLLM_PLUGINS": "farspark"}))
    assert {setting.name for setting in (*SETTINGS, *DEPTH_SETTINGS)} < set(rows)
    assert rows["VLLM_DSPARK_DEPTH_POLICY"] == ("off", "default")
    assert rows["VLLM_DSPARK_ROUND_MS"] == ("not set", "default")
    assert rows[f"{R}_N_OUT"] == ("auto", "default")
    assert rows[R] == ("tcp://10.0.0.2:18620", "x.env:1")
    assert rows[f"{R}_TIMEOUT_MS"] == ("20", "x.env:3")
    assert rows[f"{R}_TRIP"] == ("7", "environment")
    assert rows["VLLM_PLUGINS"] == ("farspark", "environment")
    assert rows["A"] == ("1", "x.env:4")
    assert "PATH" not in rows
    assert rows[f"{R}_POLICY"] == ("shadow", "default")
    assert rows[f"{R}_WANT_MARGIN"] == ("1", "default")
    assert rows[f"{R}_BACKOFF_MAX_MS"] == ("30000", "default")
    assert rows[f"{R}_STRICT_START"] == ("0", "default")
    assert rows[f"{R}_BIND"] == ("not set", "default")
    assert rows[f"{R}_SPIN_US"] == ("200, where an endpoint does not say ?spin_us=", "default")
    assert rows[f"{R}_RING"] == ("the drafter's window; full attention: 512", "default")
    assert rows[f"{R}_MARKOV_IDENTITY"] == ("not checked", "default")
    assert rows[f"{R}_ASYNC_WATCHDOG_MS"] == ("0", "default")
    rows = origins(launch(REMOTE + f"{R}_POLICY=capacity\n{R}_ASYNC=1\n{R}_TIMEOUT_MS=70\n"))
    assert rows[f"{R}_ASYNC_WATCHDOG_MS"] == ("0: 280 with this timeout", "default")


def test_the_depth_policy_is_explained_and_a_bad_one_is_an_error_with_file_and_line() -> None:
    text = REMOTE + f"{R}_POLICY=capacity\nVLLM_DSPARK_DEPTH_POLICY=conf\n"
    costs = f"{R}_DRAFT_MS=1.5\n{R}_ROUND_MS=8,9\n"
    rows = origins(launch(text + costs, VLLM_DSPARK_DEPTH_FILE="depth"))
    assert rows["VLLM_DSPARK_DEPTH_POLICY"] == ("conf", "x.env:4")
    assert rows["VLLM_DSPARK_DEPTH_FILE"] == ("depth", "environment")
    assert rows[f"{R}_ROUND_MS"] == ("8,9", "x.env:6")
    with pytest.raises(ConfigError, match=rf"^x\.env:4: VLLM_DSPARK_DEPTH_POLICY=conf .* {R}_DRAFT_MS and"):
        launch(text)
    assert "VLLM_DSPARK_DEPTH_POLICY" in launch("VLLM_DSPARK_DEPTH_POLICY=conf\n").without_effect


def test_without_an_endpoint_the_explanation_says_that_farspark_is_inert() -> None:
    assert origins(launch("A=1\n")) == {R: ("not set: Farspark is inert", "default"), "A": ("1", "x.env:1")}
    assert origins(launch(f"{R}=\n"))[R] == ("not set: Farspark is inert", "x.env:1")


def test_the_pipelines_transport_is_explained_with_an_endpoint_or_without() -> None:
    pp = "VLLM_DSPARK_PP_TRANSPORT"
    assert origins(launch(f"{pp}=1\n")) == {R: ("not set: nothing is remote", "default"), pp: ("1", "x.env:1")}
    from_environment = launch("A=1\n", VLLM_WEDGE_AB_CAP_CONCURRENT="1")
    assert origins(from_environment)["VLLM_WEDGE_AB_CAP_CONCURRENT"] == ("1", "environment")
    with pytest.raises(ConfigError, match=rf"^x\.env:1: {pp}='si': expected 1/true"):
        launch(f"{pp}=si\n")
    with pytest.raises(ConfigError, match=r"keeps vLLM from loading Farspark, and VLLM_DSPARK_PP_… would be ignored"):
        refuse_unloadable(launch(f"{pp}=1\nVLLM_PLUGINS=other\n"))


def test_the_shipped_configs_are_those_that_the_settings_allow_today() -> None:
    assert [path.stem for path in CONFIGS] == [
        "A-local",
        "C-capacity-async",
        "C-capacity-nodrop",
        "C-capacity",
        "C-resilience",
        "C-shadow-remote",
        "C-shadow",
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_is_valid_says_what_it_is_for_and_explains_every_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert re.match(rf"# {path.stem}: \w.*\.$", lines[0])
    for above, line in itertools.pairwise(lines):
        if line and not line.startswith("#"):
            assert above.startswith("# "), line
    environ = {"FARSPARK_ENDPOINT": "tcp://10.0.0.2:18620", "FARSPARK_IDENTITY": IDENTITY}
    made = prepare(parse_launch(text, path.name), environ)
    refuse_unloadable(made)
    assert made.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    policies = {
        "A-local": None,
        "C-shadow": Policy.SHADOW,
        "C-shadow-remote": Policy.SHADOW,
        "C-capacity": Policy.CAPACITY,
        "C-capacity-async": Policy.CAPACITY,
        "C-capacity-nodrop": Policy.CAPACITY,
        "C-resilience": Policy.RESILIENCE,
    }
    assert (made.config.policy if made.config else None) is policies[path.stem]
    if made.config is not None:
        assert made.config.identity.hex() == IDENTITY
        keeps = KeepCachedBlocks.ALWAYS if path.stem == "C-capacity-nodrop" else KeepCachedBlocks.AUTO
        assert made.config.keep_cached_blocks is keeps
        asynchronous = made.config.asynchronous
        assert (asynchronous is not None) is (path.stem == "C-capacity-async")
        assert asynchronous is None or asynchronous.loads_modules_eagerly
        with pytest.raises(ConfigError, match="export FARSPARK_"):
            prepare(parse_launch(text, path.name), {})
