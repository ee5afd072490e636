"""Every setting: its rule and its error text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from farspark.engine.config import AsyncProxy, EngineConfig, KeepCachedBlocks, Policy, read_config
from farspark.engine.depth import OFF, Costs, DepthPolicy, Mode
from farspark.errors import ConfigError

R = "VLLM_DSPARK_REMOTE"
BASE = {R: "tcp://10.0.0.2:18620", f"{R}_IDENTITY": "ab" * 32}


def read(**settings: str) -> EngineConfig:
    config = read_config(BASE | {f"{R}_{name}": value for name, value in settings.items()})
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("rank", "order", "files"),
    [
        (0, "abc", ("stats.json", "rounds")),
        (1, "bca", ("stats-dp1.json", "rounds-dp1")),
        (2, "cab", ("stats-dp2.json", "rounds-dp2")),
        (4, "bca", ("stats-dp4.json", "rounds-dp4")),
    ],
)
def test_data_parallel_ranks_are_spread_over_the_endpoints_and_write_files_of_their_own(
    rank: int, order: str, files: tuple[str, str], tmp_path: Path
) -> None:
    config = read_config(
        BASE
        | {
            R: "tcp://a:1,tcp://b:1,tcp://c:1",
            f"{R}_STATS_FILE": str(tmp_path / "stats.json"),
            f"{R}_CAPTURE": str(tmp_path / "rounds"),
        }
    )
    assert config is not None
    mine = config.for_dp_rank(rank)
    assert "".join(one.host for one in mine.endpoints) == order
    assert mine.capture is not None
    assert (mine.stats_file.name, mine.capture.name) == files
    assert mine.stats_file.parent == mine.capture.parent == tmp_path
    assert read().for_dp_rank(3).endpoints == read().endpoints


@pytest.mark.parametrize("value", ["", "   "])
def test_without_an_endpoint_farspark_is_inert_whatever_else_is_set(value: str) -> None:
    assert read_config({R: value, f"{R}_NONSENSE": "1"}) is None
    assert read_config({}) is None


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = read()
    assert config.policy is Policy.SHADOW
    assert [str(one) for one in config.endpoints] == ["tcp://10.0.0.2:18620"]
    assert (config.timeout_s, config.connect_timeout_s) == (0.05, 1.0)
    assert (config.backoff_s, config.backoff_max_s) == (1.0, 30.0)
    assert config.markov_identity == bytes(32)
    assert config.want_margin
    assert not config.strict_start
    assert (config.trip, config.cooldown) == (3, 256)
    assert config.log_every == 1024
    assert not read(POLICY="capacity").want_margin
    assert (config.depth_policy, config.depth_file, config.depth_costs()) == (OFF, None, None)
    assert config.may_cut_n_out


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("POLICY", "resilient", "shadow, resilience or capacity"),
        ("SHADOW_USE", "both", "local or remote"),
        ("ON_FAIL", "stop", "target_only or raise"),
        ("IDENTITY", "ab", "64 hex digits"),
        ("IDENTITY", "zz" * 32, "64 hex digits"),
        ("MARKOV_IDENTITY", "12", "64 hex digits"),
        ("TIMEOUT_MS", "0", "1 or more"),
        ("TIMEOUT_MS", "-1", "1 or more"),
        ("TIMEOUT_MS", "soon", "1 or more"),
        ("TIMEOUT_MS", "nan", "1 or more"),
        ("TIMEOUT_MS", "inf", "1 or more"),
        ("CONNECT_TIMEOUT_MS", "0", "1 or more"),
        ("BACKOFF_MS", "0", "1 or more"),
        ("SPIN_US", "-1", "whole microseconds, 0 to 1000000"),
        ("SPIN_US", "1.5", "whole microseconds, 0 to 1000000"),
        ("SPIN_US", "1000001", "whole microseconds, 0 to 1000000"),
        ("TRIP", "-1", "0 = off"),
        ("COOLDOWN", "0", "1 or more"),
        ("STRICT_START", "maybe", "1/true/on/yes"),
        ("KEEP_CACHED_BLOCKS", "sometimes", "auto, 1/true/on/yes"),
        ("RECLAIM_MTP", "2", "1/true/on/yes"),
        ("WANT_MARGIN", "2", "1/true/on/yes"),
        ("CONTEXT", "0", "1 or more"),
        ("RING", "1.5", "1 or more"),
        ("LOG_EVERY", "-1", "0 = off"),
        ("CAPTURE_MIB", "0", "1 or more"),
        ("CAPTURE_MIB", "1.5", "whole number of MiB"),
        ("CAPTURE", "no/such/folder/file", "the folder no/such/folder does not exist"),
        ("DRAFT_MS", "-0.1", "one finite number of milliseconds, 0 or more"),
        ("DRAFT_MS", "1,2", "one finite number"),
        ("DRAFT_MS", "nan", "one finite number"),
        ("DRAFT_MS", "inf", "one finite number"),
        ("ROUND_MS", "8,x", "'x': expected a finite number of milliseconds above 0"),
        ("ROUND_MS", "8,0", "finite number of milliseconds above 0"),
        ("ROUND_MS", "8,inf", "finite number of milliseconds above 0"),
        ("ROUND_MS", "8,7", "7 follows 8; verifying more never takes less time"),
        ("ASYNC", "2", "1/true/on/yes"),
        ("ASYNC_PROXY", "fork", "thread or process"),
        ("ASYNC_NAP_US", "-1", "microseconds, 0 = never sleep"),
        ("ASYNC_SPIN_US", "nan", "microseconds, 0 or more"),
        ("ASYNC_WATCHDOG_MS", "-5", "0 = four times the round's timeout"),
        ("ASYNC_RESPAWNS", "1.5", "a whole number of processes"),
        ("ASYNC_RESPAWN_RESET_S", "-1", "seconds, 0 = never"),
        ("SWITCH_INTERVAL_US", "inf", "0 = leave the interpreter's"),
        ("N_OUT", "5", "auto, or 0"),
        ("N_OUT", "1", "auto, or 0"),
    ],
)
def test_HALF_OPEN_a_bad_value_names_the_variable_the_value_and_what_was_expected(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    assert f"{R}_{name}=" in str(caught.value)
    assert value in str(caught.value)
    assert expected in str(caught.value)


def test_a_capture_is_a_path_and_a_limit(tmp_path: Path) -> None:
    assert read().capture is None
    config = read(CAPTURE=str(tmp_path / "rounds"), CAPTURE_MIB="3")
    assert (config.capture, config.capture_bytes) == (tmp_path / "rounds", 3 << 20)
    assert read().capture_bytes == 1 << 30


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=rf"{R}_TIMEOUT is not a setting.*nearest one is {R}_TIMEOUT_MS"):
        read(TIMEOUT="50")


def test_an_empty_value_means_unset() -> None:
    assert read(TIMEOUT_MS="", NONSENSE="").timeout_s == 0.05


def test_a_missing_identity_says_where_to_get_it() -> None:
    with pytest.raises(ConfigError, match="farspark identity CHECKPOINT"):
        read_config({R: "tcp://h:1"})


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({"SHADOW_USE": "remote", "POLICY": "capacity"}, "shadow"),
        ({"ON_FAIL": "raise", "POLICY": "resilience"}, "capacity"),
        ({"KEEP_CACHED_BLOCKS": "1", "POLICY": "resilience"}, "capacity"),
        ({"KEEP_CACHED_BLOCKS": "0"}, "capacity"),
    ],
)
def test_a_setting_of_another_policy_is_refused(settings: dict[str, str], policy: str) -> None:
    with pytest.raises(ConfigError, match=rf"with {R}_POLICY={policy} only"):
        read(**settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", KeepCachedBlocks.AUTO),
        ("Auto", KeepCachedBlocks.AUTO),
        ("on", KeepCachedBlocks.ALWAYS),
        ("0", KeepCachedBlocks.NEVER),
    ],
)
def test_APC_LOSS_whether_cached_blocks_are_kept_is_a_setting(text: str, expected: KeepCachedBlocks) -> None:
    assert read(POLICY="capacity", KEEP_CACHED_BLOCKS=text).keep_cached_blocks is expected


def test_the_mtp_buffer_is_reclaimed_unless_that_is_switched_off() -> None:
    assert read(POLICY="capacity").reclaims_mtp_buffer
    assert not read(POLICY="capacity", RECLAIM_MTP="off").reclaims_mtp_buffer


def test_rounds_are_synchronous_unless_asked_for() -> None:
    assert read(POLICY="capacity").asynchronous is None
    assert read(POLICY="capacity", ASYNC_PROXY="process").asynchronous is None


def test_asynchronous_rounds_have_the_documented_defaults() -> None:
    settings = read(POLICY="capacity", ASYNC="1").asynchronous
    assert settings is not None
    assert settings.proxy is AsyncProxy.THREAD
    assert (settings.nap_us, settings.spin_us, settings.switch_interval_us) == (0, 1000, 500)
    assert (settings.respawns, settings.respawn_reset_s) == (3, 3600)
    assert settings.watchdog_s == 0.2
    assert settings.library is None
    assert not settings.loads_modules_eagerly


@pytest.mark.parametrize(
    ("timeout", "watchdog", "seconds"), [("50", "", 0.2), ("80", "0", 0.32), ("20", "", 0.2), ("50", "75", 0.075)]
)
def test_the_watchdog_is_four_timeouts_unless_it_is_set(timeout: str, watchdog: str, seconds: float) -> None:
    settings = read(POLICY="capacity", ASYNC="1", TIMEOUT_MS=timeout, ASYNC_WATCHDOG_MS=watchdog).asynchronous
    assert settings is not None
    assert settings.watchdog_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"POLICY": "shadow"}, "ASYNC=1 needs .*POLICY=capacity, which is shadow here"),
        ({"POLICY": "resilience"}, "which is resilience here"),
        ({"POLICY": "capacity", "ON_FAIL": "raise"}, "contradicts .*ON_FAIL=raise: the host never waits"),
        ({"POLICY": "capacity", "ASYNC_WATCHDOG_MS": "50"}, "WATCHDOG_MS=50 is not above .*TIMEOUT_MS=50"),
        ({"POLICY": "capacity", "HOSTFLAG_LIB": "/no/such.so"}, "HOSTFLAG_LIB='/no/such.so': no such file"),
        (
            {"POLICY": "capacity", "HOSTFLAG_LIB": "/no/such.so"},
            "make one with `python -m farspark.native hostflag FILE`",
        ),
    ],
)
def test_asynchronous_rounds_that_cannot_be_are_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(ASYNC="1", **settings)


def test_lazy_load_whether_modules_are_loaded_eagerly_is_known() -> None:
    config = read_config(BASE | {f"{R}_POLICY": "capacity", f"{R}_ASYNC": "on", "CUDA_MODULE_LOADING": "eager"})
    assert config is not None
    assert config.asynchronous is not None
    assert config.asynchronous.loads_modules_eagerly


def test_a_backoff_that_would_shrink_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"BACKOFF_MAX_MS=10 is below .*BACKOFF_MS=20"):
        read(BACKOFF_MS="20", BACKOFF_MAX_MS="10")


def test_a_ring_larger_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RING=200 is above .*CONTEXT=100"):
        read(RING="200", CONTEXT="100")


def test_ADDR_a_bad_endpoint_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=rf"^{R}='tcp://host'"):
        read_config(BASE | {R: "tcp://host"})


def test_bind_fills_in_and_may_not_contradict() -> None:
    assert read(BIND="10.0.0.1").endpoints[0].bind == "10.0.0.1"
    with pytest.raises(ConfigError, match="contradicts"):
        read_config(BASE | {R: "tcp://10.0.0.2:1?bind=10.0.0.3", f"{R}_BIND": "10.0.0.1"})


def test_the_time_to_spin_is_set_for_all_endpoints_and_may_not_contradict_one() -> None:
    assert read().endpoints[0].spin_us is None
    both = read_config(BASE | {R: "tcp://a:1,tcp://b:2?spin_us=300", f"{R}_SPIN_US": "300"})
    assert both is not None
    assert [one.spin_us for one in both.endpoints] == [300, 300]
    assert read(SPIN_US="0").endpoints[0].spin_us == 0
    with pytest.raises(ConfigError, match=rf"{R}_SPIN_US=0 contradicts \?spin_us=300 of tcp://b:2"):
        read_config(BASE | {R: "tcp://a:1,tcp://b:2?spin_us=300", f"{R}_SPIN_US": "0"})


def test_several_endpoints_keep_their_order() -> None:
    config = read_config(BASE | {R: "tcp://a:1, tcp://b:2"})
    assert config is not None
    assert [one.host for one in config.endpoints] == ["a", "b"]


def test_the_markov_identity_defaults_to_the_digest_of_the_cache_file(tmp_path: Path) -> None:
    cache = tmp_path / "markov.bin"
    cache.write_bytes(b"bias")
    config = read_config(BASE | {"VLLM_DSPARK_MARKOV_CACHE": str(cache)})
    assert config is not None
    assert config.markov_identity == hashlib.sha256(b"bias").digest()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(BASE | {"VLLM_DSPARK_MARKOV_CACHE": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("settings", "window", "max_model_len", "expected"),
    [
        ({}, None, 32768, (4096, 512)),
        ({}, None, 1024, (1024, 512)),
        ({}, None, 256, (256, 256)),
        ({}, 128, 32768, (128, 128)),
        ({"CONTEXT": "64"}, 128, 32768, (64, 64)),
        ({"CONTEXT": "2048", "RING": "1024"}, None, 32768, (2048, 1024)),
    ],
)
def test_context_and_ring_follow_the_window_the_settings_and_the_model_length(
    settings: dict[str, str], window: int | None, max_model_len: int, expected: tuple[int, int]
) -> None:
    assert read(**settings).context_and_ring(window, max_model_len) == expected


# The depth policy and its costs.

D = "VLLM_DSPARK"
REMOTE_POLICIES = ["capacity", "resilience"]


def read_depth(policy: str, **settings: str) -> EngineConfig:
    """The rest of the names as they are: `DEPTH_POLICY` for VLLM_DSPARK_DEPTH_POLICY, `REMOTE_DRAFT_MS` and so on."""
    environ = {f"{D}_{name}": value for name, value in settings.items()}
    config = read_config(BASE | {f"{R}_POLICY": policy} | environ)
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DEPTH_POLICY", "often", "'often' is no mode; expected off, fixed:DEPTH, conf"),
        ("DEPTH_POLICY", "fixed", "expected fixed:DEPTH"),
        ("DEPTH_POLICY", "conf:2,1", "1 follows 2"),
        ("DRAFT_MS", "-1", "one finite number of milliseconds, 0 or more"),
        ("ROUND_MS", "8,7", "7 follows 8"),
    ],
)
@pytest.mark.parametrize("policy", ["shadow", *REMOTE_POLICIES])
def test_a_bad_depth_setting_names_the_variable_the_value_and_what_was_expected(
    policy: str, name: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_depth(policy, **{name: value})
    assert str(caught.value).startswith(f"{D}_{name}={value!r}: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("policy", REMOTE_POLICIES)
@pytest.mark.parametrize("depth", ["conf", "confb", "conf:1,2,3"])
@pytest.mark.parametrize(
    ("costs", "missing"),
    [
        ({}, f"{R}_DRAFT_MS and {R}_ROUND_MS are not set"),
        ({"REMOTE_DRAFT_MS": "1"}, f"; {R}_ROUND_MS is not set"),
        ({"REMOTE_ROUND_MS": "8,9,10"}, f"; {R}_DRAFT_MS is not set"),
        # The live table holds the local drafter, so neither of the two stands in.
        ({"REMOTE_DRAFT_MS": "1", "ROUND_MS": "8,9,10"}, f"; {R}_ROUND_MS is not set"),
        ({"REMOTE_ROUND_MS": "8,9,10", "DRAFT_MS": "1"}, f"; {R}_DRAFT_MS is not set"),
    ],
)
def test_a_priced_depth_needs_both_remote_costs_and_the_error_names_what_is_missing(
    policy: str, depth: str, costs: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_depth(policy, DEPTH_POLICY=depth, **costs)
    text = str(caught.value)
    assert text.startswith(f"{D}_DEPTH_POLICY={depth} with {R}_POLICY={policy} needs both")
    assert missing in text
    assert "holds the local drafter's time too" in text
    assert f"or set {D}_DEPTH_POLICY=off" in text


@pytest.mark.parametrize("policy", REMOTE_POLICIES)
def test_the_remote_costs_are_the_price_and_replace_the_live_ones(policy: str) -> None:
    config = read_depth(
        policy, DEPTH_POLICY="conf", REMOTE_DRAFT_MS="0", REMOTE_ROUND_MS="8, 9,10", DRAFT_MS="3", ROUND_MS="20,20,20"
    )
    assert config.depth_costs() == Costs((8, 9, 10), 0)
    config.check_depths(2)


def test_shadow_ignores_both_costs() -> None:
    for costs in ({}, {"REMOTE_DRAFT_MS": "1"}, {"REMOTE_ROUND_MS": "8,9,10"}):
        config = read_depth("shadow", DEPTH_POLICY="conf", **costs)
        assert config.depth_costs() is None
        config.check_depths(5)
    live = read_depth("shadow", DEPTH_POLICY="confr:1=2", DRAFT_MS="3", ROUND_MS="20,21", REMOTE_DRAFT_MS="1")
    assert (live.draft_ms, live.round_ms) == (3, (20, 21))


@pytest.mark.parametrize("policy", REMOTE_POLICIES)
def test_a_fixed_depth_needs_no_costs_unless_a_file_can_switch_the_mode(policy: str, tmp_path: Path) -> None:
    assert read_depth(policy, DEPTH_POLICY="fixed:2").depth_policy == DepthPolicy(Mode.FIXED, depth=2)
    file = str(tmp_path / "depth")
    for depth in ("fixed:2", "off", ""):
        with pytest.raises(ConfigError, match=rf"^{D}_DEPTH_FILE='.*depth', which can switch .* needs both") as caught:
            read_depth(policy, DEPTH_POLICY=depth, DEPTH_FILE=file, REMOTE_DRAFT_MS="1")
        assert f"; {R}_ROUND_MS is not set" in str(caught.value)
        assert f"and unset {D}_DEPTH_FILE" in str(caught.value)
    config = read_depth(policy, DEPTH_POLICY="fixed:2", DEPTH_FILE=file, REMOTE_DRAFT_MS="1", REMOTE_ROUND_MS="8,9,10")
    assert config.depth_file == Path(file)


@pytest.mark.parametrize("policy", REMOTE_POLICIES)
def test_confr_is_refused_where_its_table_would_hold_another_drafter(policy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_depth(policy, DEPTH_POLICY="confr:1=7,8=9", REMOTE_DRAFT_MS="1", REMOTE_ROUND_MS="8,9,10")
    assert str(caught.value).startswith(f"{D}_DEPTH_POLICY=confr:1=7,8=9 with {R}_POLICY={policy}: ")
    assert "measured with the local drafter; use conf or confb" in str(caught.value)


@pytest.mark.parametrize("policy", REMOTE_POLICIES)
def test_with_the_policy_off_costs_are_parsed_and_otherwise_unused(policy: str) -> None:
    config = read_depth(policy, REMOTE_ROUND_MS="8,9")
    config.check_depths(5)
    with pytest.raises(ConfigError, match=f"^{R}_ROUND_MS="):
        read_depth(policy, REMOTE_ROUND_MS="9,8")


@pytest.mark.parametrize("policy", REMOTE_POLICIES)
def test_where_the_number_of_drafts_is_known_the_table_and_the_depth_must_fit_it(policy: str) -> None:
    config = read_depth(policy, DEPTH_POLICY="confb", REMOTE_DRAFT_MS="1", REMOTE_ROUND_MS="8,9,10")
    config.check_depths(2)
    with pytest.raises(ConfigError) as caught:
        config.check_depths(5)
    assert str(caught.value).startswith(f"{R}_ROUND_MS=8,9,10: 3 values, but the engine drafts 5 tokens; expected 6")
    fixed = read_depth(policy, DEPTH_POLICY="fixed:6")
    fixed.check_depths(6)
    with pytest.raises(ConfigError, match=rf"^{D}_DEPTH_POLICY=fixed:6: the engine drafts 5 tokens"):
        fixed.check_depths(5)


def test_whether_positions_may_be_left_out_is_a_setting() -> None:
    assert read(N_OUT="AUTO").may_cut_n_out
    assert not read(N_OUT="0").may_cut_n_out


def token_file(path: Path, text: str = "0123456789abcdef\n", mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_token_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    assert read().token is None
    assert read(TOKEN_FILE="").token is None
    config = read(TOKEN_FILE=token_file(tmp_path / "token"))
    assert config.token == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(config)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("0123456789abcdef", 0o640, "others may read or change it (mode 0640); chmod 600"),
        ("0123456789abcdef", 0o604, "others may read or change it (mode 0604); chmod 600"),
        ("short", 0o600, "a token of 5 bytes, expected 16 to 4096; `openssl rand -hex 32"),
        ("", 0o600, "a token of 0 bytes"),
        ("x" * 4097, 0o600, "a token of more than 4096 bytes"),
    ],
)
def test_a_bad_token_file_names_the_variable_the_path_and_the_remedy(
    text: str, mode: int, said: str, tmp_path: Path
) -> None:
    path = token_file(tmp_path / "token", text, mode)
    with pytest.raises(ConfigError) as caught:
        read(TOKEN_FILE=path)
    assert str(caught.value).startswith(f"{R}_TOKEN_FILE={path!r}: {said}")
    assert text == "" or text not in str(caught.value)


def test_a_token_file_that_is_not_there_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{R}_TOKEN_FILE='.*none': cannot be read \(No such file"):
        read(TOKEN_FILE=str(tmp_path / "none"))


def test_the_directory_of_ucx_holds_for_endpoints_over_ucx_only(tmp_path: Path) -> None:
    (tmp_path / "libucp.so.0").touch()
    config = read_config(BASE | {R: "ucx://a:1,tcp://b:2,o1rdma://c:3", f"{R}_UCX_DIR": str(tmp_path)})
    assert config is not None
    endpoints = config.endpoints
    assert [endpoint.ucx_dir for endpoint in endpoints] == [str(tmp_path), "", str(tmp_path)]
    with pytest.raises(ConfigError, match=rf"{R}_UCX_DIR='{tmp_path}' contradicts \?ucx_dir=/opt/ucx of ucx://a:1"):
        read_config(BASE | {R: "ucx://a:1?ucx_dir=/opt/ucx", f"{R}_UCX_DIR": str(tmp_path)})
    for wrong in (f"{tmp_path}/absent", "lib"):
        with pytest.raises(ConfigError, match=rf"{R}_UCX_DIR='{wrong}': expected an absolute path"):
            read_config(BASE | {R: "ucx://a:1", f"{R}_UCX_DIR": wrong})


SAMPLED = "VLLM_DSPARK_SAMPLED_TOP32"
REPLACES = {f"{R}_POLICY": "capacity", SAMPLED: "1"}


def test_sampled_drafts_are_off_unless_asked_for() -> None:
    assert not read(POLICY="capacity").sampled
    for policy in ("capacity", "resilience"):
        config = read_config(BASE | REPLACES | {f"{R}_POLICY": policy, "VLLM_DSPARK_DEPTH_POLICY": "fixed:2"})
        assert config is not None
        assert config.sampled
    config = read_config(BASE | REPLACES | {f"{R}_ASYNC": "1"})
    assert config is not None
    assert config.sampled


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({SAMPLED: "perhaps"}, f"^{SAMPLED}='perhaps': expected 1/true/on/yes or 0/false/off/no$"),
        ({f"{R}_POLICY": "shadow"}, f"^{SAMPLED}=1 contradicts {R}_POLICY=shadow: .* then set it with capacity"),
        (
            {
                "VLLM_DSPARK_DEPTH_POLICY": "conf",
                f"{R}_DRAFT_MS": "1",
                f"{R}_ROUND_MS": "8,8,8",
            },
            f"^{SAMPLED}=1 contradicts VLLM_DSPARK_DEPTH_POLICY=conf: .* off or fixed:<d>",
        ),
        (
            {"VLLM_DSPARK_DEPTH_FILE": "/run/depth", f"{R}_DRAFT_MS": "1", f"{R}_ROUND_MS": "8,8,8"},
            f"^{SAMPLED}=1 contradicts VLLM_DSPARK_DEPTH_FILE='/run/depth': .* or unset it$",
        ),
    ],
)
def test_what_sampled_drafts_contradict_is_refused_with_the_remedy(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_config(BASE | REPLACES | settings)


def test_sampled_drafts_are_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{SAMPLED}=1 contradicts {R}_CAPTURE='.*': .* Record without it$"):
        read_config(BASE | REPLACES | {f"{R}_CAPTURE": str(tmp_path / "rounds")})
