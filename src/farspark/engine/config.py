"""The engine's settings: the only reader of the environment, parsed once, checked as a whole, frozen, handed down.

Every setting is a row of `SETTINGS`; a name with our prefix that is no row is an error that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import hashlib
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from farspark.engine.depth import (
    FILE,
    OFF,
    POLICY,
    SYNTAX,
    Costs,
    DepthPolicy,
    check_table,
    parse_ms_by_depth,
    parse_policy,
    refuse_local_table,
    resolve,
)
from farspark.errors import ConfigError
from farspark.token_file import read_token
from farspark.transport.endpoint import MAX_SPIN_US, UCX_SCHEMES, Endpoint, parse_endpoints

PREFIX: Final = "VLLM_DSPARK_REMOTE"
LOCAL_PREFIX: Final = "VLLM_DSPARK"
PP_PREFIX: Final = "VLLM_DSPARK_PP"
MARKOV_CACHE: Final = "VLLM_DSPARK_MARKOV_CACHE"
TOKEN_FILE: Final = f"{PREFIX}_TOKEN_FILE"
SAMPLED: Final = "VLLM_DSPARK_SAMPLED_TOP32"

_TRUE: Final = frozenset({"1", "true", "on", "yes"})
_FALSE: Final = frozenset({"0", "false", "off", "no"})

# The context of a drafter with full attention, and how many of its rows rank 0 can send again: a row is 25 to 51 KB,
# so the ring of a full-attention drafter is kept far shorter than its context.
FULL_ATTENTION_CONTEXT: Final = 4096
FULL_ATTENTION_RING: Final = 512


class Policy(enum.Enum):
    """Whose drafts are verified, and whether a local drafter exists."""

    SHADOW = "shadow"  # local drafts are verified; remote ones are compared with them
    RESILIENCE = "resilience"  # remote drafts are verified, local ones for whatever the worker failed in a round
    CAPACITY = "capacity"  # no local drafter; remote drafts or none


class ShadowUse(enum.Enum):
    """Whose drafts the target verifies in shadow."""

    LOCAL = "local"
    REMOTE = "remote"


class OnFail(enum.Enum):
    """What a round without any draft means in capacity."""

    TARGET_ONLY = "target_only"
    RAISE = "raise"  # on every rank: for benchmarks, which must not go on as if drafts had come


class FusedGather(enum.Enum):
    """Whether the gather is one Triton launch instead of some forty operations of torch."""

    AUTO = "auto"  # on CUDA, if it makes the same bytes as the torch form
    ON = "1"  # it must, or the engine does not start
    OFF = "0"


class KeepCachedBlocks(enum.Enum):
    """Whether a prefix-cache hit in capacity keeps its last block, which vLLM drops for a local drafter's sake."""

    AUTO = "auto"  # yes; where that is out of reach it is said
    ALWAYS = "1"  # yes; where that is out of reach the engine does not start
    NEVER = "0"  # vLLM's own rule stands


class AsyncProxy(enum.Enum):
    """Where asynchronous rounds are run."""

    THREAD = "thread"  # of the engine's process
    PROCESS = "process"  # a child without torch, with an interpreter of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSettings:
    """How asynchronous rounds are served."""

    proxy: AsyncProxy
    nap_us: float  # between two looks for a round; 0: no sleep at all
    spin_us: float  # looks without sleep before the first nap
    watchdog_s: float  # a round that is pending for so long is failed
    respawns: int  # proxy processes after the first
    respawn_reset_s: float  # a proxy process that served so long restores the budget; 0: never
    switch_interval_us: float  # of the GIL, thread only; 0: the interpreter's
    library: Path | None  # of the native helper; None: packaged, cached or compiled
    loads_modules_eagerly: bool  # CUDA_MODULE_LOADING=EAGER

    @property
    def spin_ns(self) -> int:
        return round(self.spin_us * 1000)

    @property
    def nap_ns(self) -> int:
        return round(self.nap_us * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that was set, with defaults filled in. Seconds are floats, identities 32 bytes."""

    endpoints: tuple[Endpoint, ...]  # tried in this order; this side's address is in them
    policy: Policy
    identity: bytes
    markov_identity: bytes  # zeros: not checked
    token: bytes | None = field(repr=False)  # None: neither side proves itself
    timeout_s: float  # per round
    connect_timeout_s: float  # connect and HELLO
    backoff_s: float
    backoff_max_s: float
    trip: int  # failed attempts in a row that open the circuit breaker; 0 = off
    cooldown: int  # rounds that then touch no network
    strict_start: bool
    shadow_use: ShadowUse
    on_fail: OnFail
    keep_cached_blocks: KeepCachedBlocks
    reclaims_mtp_buffer: bool  # in capacity
    want_margin: bool
    context: int | None  # None: the drafter's window, else FULL_ATTENTION_CONTEXT
    ring: int | None  # None: the context of a windowed drafter, else FULL_ATTENTION_RING
    fused_gather: FusedGather
    log_every: int  # rounds between summary lines; 0 = off
    stats_file: Path
    depth_policy: DepthPolicy
    depth_file: Path | None  # read again when it changes; None: the policy stays
    draft_ms: float | None  # of a remote round; in shadow of the local drafter, and unused
    round_ms: tuple[float, ...] | None  # to verify, by depth 0..N; in shadow with the local drafter, and unused
    may_cut_n_out: bool
    capture: Path | None  # None: rounds are not recorded
    capture_bytes: int  # the capture stops there
    asynchronous: AsyncSettings | None  # None: the engine thread runs every round
    sampled: bool = False  # drafts of requests with a temperature are drawn, and verified by what they were drawn from

    def for_dp_rank(self, rank: int) -> EngineConfig:
        """The same for the data-parallel rank `rank`: with several endpoints it begins at another one, and goes on from there in
        their order, round; it writes files of its own."""
        if rank == 0:
            return self
        first = rank % len(self.endpoints)
        return dataclasses.replace(
            self,
            endpoints=self.endpoints[first:] + self.endpoints[:first],
            stats_file=_of_rank(self.stats_file, rank),
            capture=None if self.capture is None else _of_rank(self.capture, rank),
        )

    def context_and_ring(self, window: int | None, max_model_len: int) -> tuple[int, int]:
        """Rows the drafter may see and rows the ring holds, for a drafter with sliding `window` (None: full attention)."""
        context = self.context or window or FULL_ATTENTION_CONTEXT
        context = min(context, max_model_len)
        ring = self.ring or (context if window else FULL_ATTENTION_RING)
        return context, min(ring, context)

    def depth_costs(self) -> Costs | None:
        """What depths are priced with; None where nothing is."""
        if self.draft_ms is None or self.round_ms is None:
            return None
        return Costs(self.round_ms, self.draft_ms)

    def check_depths(self, num_drafts: int) -> None:
        """What could not be judged before the number of drafts was known. Raises ConfigError."""
        if self.policy is Policy.SHADOW:
            return
        is_priced = self.depth_policy.mode.masks or self.depth_file is not None
        if is_priced and self.round_ms is not None:
            try:
                check_table(self.round_ms, num_drafts)
            except ValueError as error:
                raise ConfigError(
                    f"{PREFIX}_ROUND_MS={_ms_text(self.round_ms)}: {error}, first to last; measure it for this engine"
                ) from error
        try:
            resolve(self.depth_policy, num_drafts, self.depth_costs(), own_table=False)
        except ValueError as error:
            raise ConfigError(f"{POLICY}={self.depth_policy}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Setting:
    suffix: str
    parse: Callable[[str], Any]
    expected: str
    default: Any = None
    prefix: str = PREFIX
    explains: bool = False  # what `parse` raises says what is wrong

    @property
    def name(self) -> str:
        return self.prefix + self.suffix


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}-dp{rank}{path.suffix}")


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError


def _fused_gather(text: str) -> FusedGather:
    if text.lower() == "auto":
        return FusedGather.AUTO
    return FusedGather.ON if _boolean(text) else FusedGather.OFF


def _keep_cached_blocks(text: str) -> KeepCachedBlocks:
    if text.lower() == "auto":
        return KeepCachedBlocks.AUTO
    return KeepCachedBlocks.ALWAYS if _boolean(text) else KeepCachedBlocks.NEVER


def _at_least(minimum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and value >= minimum):
            raise ValueError
        return value

    return parse


def _whole_at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError
        return value

    return parse


def _spin_us(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_SPIN_US:
        raise ValueError
    return value


def _digest(text: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError
    return bytes.fromhex(text)


def _automatic(text: str) -> bool:
    return {"auto": True, "0": False}[text.lower()]


_BOOLEAN: Final = "1/true/on/yes or 0/false/off/no"
_POLICIES: Final = "shadow, resilience or capacity"

_MS_BY_DEPTH: Final = (
    "milliseconds of a round that verifies 0, 1, … N drafts: N + 1 finite numbers above 0, none below the one before, "
    "separated by commas"
)

SETTINGS: Final[tuple[_Setting, ...]] = (
    _Setting("", str, "one or more endpoints"),
    _Setting("_BIND", str, "an address of this host"),
    _Setting("_UCX_DIR", str, "the directory that has libucp.so.0"),
    _Setting("_SPIN_US", _spin_us, f"whole microseconds, 0 to {MAX_SPIN_US}, 0 = sleep at once"),
    _Setting("_POLICY", Policy, _POLICIES, Policy.SHADOW),
    _Setting("_IDENTITY", _digest, "64 hex digits, as `farspark identity CHECKPOINT` prints them"),
    _Setting("_MARKOV_IDENTITY", _digest, "64 hex digits, as `farspark identity CHECKPOINT` prints them"),
    _Setting("_TOKEN_FILE", Path, "a path"),
    _Setting("_TIMEOUT_MS", _at_least(1), "milliseconds, 1 or more", 50.0),
    _Setting("_CONNECT_TIMEOUT_MS", _at_least(1), "milliseconds, 1 or more", 1000.0),
    _Setting("_BACKOFF_MS", _at_least(1), "milliseconds, 1 or more", 1000.0),
    _Setting("_BACKOFF_MAX_MS", _at_least(1), "milliseconds, 1 or more", 30000.0),
    _Setting("_TRIP", _whole_at_least(0), "a whole number of failed rounds in a row, 0 = off", 3),
    _Setting("_COOLDOWN", _whole_at_least(1), "a whole number of rounds, 1 or more", 256),
    _Setting("_STRICT_START", _boolean, _BOOLEAN, False),
    _Setting("_SHADOW_USE", ShadowUse, "local or remote", ShadowUse.LOCAL),
    _Setting("_ON_FAIL", OnFail, "target_only or raise", OnFail.TARGET_ONLY),
    _Setting("_KEEP_CACHED_BLOCKS", _keep_cached_blocks, f"auto, {_BOOLEAN}", KeepCachedBlocks.AUTO),
    _Setting("_RECLAIM_MTP", _boolean, _BOOLEAN, True),
    _Setting("_WANT_MARGIN", _boolean, _BOOLEAN),
    _Setting("_DRAFT_MS", _at_least(0), "one finite number of milliseconds, 0 or more: what a remote round costs"),
    _Setting("_ROUND_MS", parse_ms_by_depth, _MS_BY_DEPTH, explains=True),
    _Setting("_N_OUT", _automatic, "auto, or 0 for always all positions", True),
    _Setting("_CONTEXT", _whole_at_least(1), "a whole number of positions, 1 or more"),
    _Setting("_RING", _whole_at_least(1), "a whole number of rows, 1 or more"),
    _Setting("_FUSED_GATHER", _fused_gather, f"auto, {_BOOLEAN}", FusedGather.AUTO),
    _Setting("_LOG_EVERY", _whole_at_least(0), "a whole number of rounds, 0 = off", 1024),
    _Setting("_STATS_FILE", Path, "a path"),
    _Setting("_CAPTURE", Path, "a path in a folder that exists"),
    _Setting("_CAPTURE_MIB", _whole_at_least(1), "a whole number of MiB, 1 or more", 1024),
    _Setting("_ASYNC", _boolean, _BOOLEAN, False),
    _Setting("_ASYNC_PROXY", AsyncProxy, "thread or process", AsyncProxy.THREAD),
    _Setting("_ASYNC_NAP_US", _at_least(0), "microseconds, 0 = never sleep", 0.0),
    _Setting("_ASYNC_SPIN_US", _at_least(0), "microseconds, 0 or more", 1000.0),
    _Setting("_ASYNC_WATCHDOG_MS", _at_least(0), "milliseconds, 0 = four times the round's timeout, 200 at least", 0.0),
    _Setting("_ASYNC_RESPAWNS", _whole_at_least(0), "a whole number of processes, 0 or more", 3),
    _Setting("_ASYNC_RESPAWN_RESET_S", _at_least(0), "seconds, 0 = never", 3600.0),
    _Setting("_SWITCH_INTERVAL_US", _at_least(0), "microseconds, 0 = leave the interpreter's", 500.0),
    _Setting("_HOSTFLAG_LIB", Path, "a path to a build of the native helper"),
)

# Settings that concern the drafts whoever makes them.
DEPTH_SETTINGS: Final[tuple[_Setting, ...]] = (
    _Setting("_DEPTH_POLICY", parse_policy, SYNTAX, OFF, prefix=LOCAL_PREFIX, explains=True),
    _Setting("_DEPTH_FILE", Path, "a path", prefix=LOCAL_PREFIX),
    _Setting("_DRAFT_MS", _at_least(0), "one finite number of milliseconds, 0 or more", prefix=LOCAL_PREFIX),
    _Setting("_ROUND_MS", parse_ms_by_depth, _MS_BY_DEPTH, prefix=LOCAL_PREFIX, explains=True),
    _Setting("_SAMPLED_TOP32", _boolean, _BOOLEAN, False, prefix=LOCAL_PREFIX),
)

# The pipeline-parallel token transport, for whichever drafter; works without an endpoint.
PP_SETTINGS: Final[tuple[_Setting, ...]] = (
    _Setting("_TRANSPORT", _boolean, _BOOLEAN, prefix=PP_PREFIX),
    _Setting("_CAP", _boolean, _BOOLEAN, prefix=PP_PREFIX),
    _Setting("_CPU", _boolean, _BOOLEAN, prefix=PP_PREFIX),
    _Setting("_EAGER_DRAFT", _boolean, _BOOLEAN, prefix=PP_PREFIX),
)
PP_ALIASES: Final[Mapping[str, str]] = {
    "_CAP": "VLLM_WEDGE_AB_CAP_CONCURRENT",
    "_CPU": "VLLM_WEDGE_AB_PP_BROADCAST_CPU",
    "_EAGER_DRAFT": "VLLM_WEDGE_AB_DSPARK_EAGER",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PpConfig:
    """What was asked of the pipeline-parallel token transport."""

    transport: bool  # the fixed schedule, its checks, and the repair of synchronous scheduling
    cap: bool  # as many batches in flight as stages
    on_cpu: bool  # the transport's broadcasts go over the host
    eager_draft: bool  # the draft runs without CUDA graphs


def read_pp_config(environ: Mapping[str, str] | None = None) -> PpConfig | None:
    """The transport's settings in `environ` (this process's environment if None); None where nothing is switched on.

    Raises ConfigError naming the variable, its value and what was expected.
    """
    environ = os.environ if environ is None else environ
    _refuse_unknown(environ, PP_PREFIX, PP_SETTINGS)
    values = {setting.suffix: _value_or_alias(setting, environ) for setting in PP_SETTINGS}
    if values["_TRANSPORT"] is False and values["_CPU"]:
        raise ConfigError(
            f"{PP_PREFIX}_TRANSPORT=0 switches off what {PP_PREFIX}_CPU=1 is a part of; unset one of them"
        )
    if not any(values.values()):
        return None
    return PpConfig(
        transport=bool(values["_TRANSPORT"] or values["_CPU"]),
        cap=bool(values["_CAP"]),
        on_cpu=bool(values["_CPU"]),
        eager_draft=bool(values["_EAGER_DRAFT"]),
    )


def _value_or_alias(setting: _Setting, environ: Mapping[str, str]) -> Any:
    value = _value(setting, environ)
    name = PP_ALIASES.get(setting.suffix)
    if name is None:
        return value
    other = _value(dataclasses.replace(setting, prefix=name, suffix=""), environ)
    if value is not None and other is not None and value != other:
        raise ConfigError(
            f"{setting.name}={environ[setting.name]} contradicts {name}={environ[name]}, which is another name for it; "
            "unset one of them"
        )
    return other if value is None else value


def read_config(environ: Mapping[str, str] | None = None) -> EngineConfig | None:
    """The settings in `environ` (this process's environment if None); None where no endpoint is set: Farspark is inert.

    Raises ConfigError naming the variable, its value and what was expected.
    """
    environ = os.environ if environ is None else environ
    if not environ.get(PREFIX, "").strip():
        return None
    _refuse_unknown(environ, PREFIX, SETTINGS)
    values = {setting.suffix: _value(setting, environ) for setting in SETTINGS}
    depth = {setting.suffix: _value(setting, environ) for setting in DEPTH_SETTINGS}

    if values["_IDENTITY"] is None:
        raise ConfigError(
            f"{PREFIX}_IDENTITY is not set; the worker must prove that it runs this drafter. "
            "Set it to the 64 hex digits that `farspark identity CHECKPOINT` prints"
        )
    if values["_BACKOFF_MAX_MS"] < values["_BACKOFF_MS"]:
        raise ConfigError(
            f"{PREFIX}_BACKOFF_MAX_MS={values['_BACKOFF_MAX_MS']:g} is below {PREFIX}_BACKOFF_MS="
            f"{values['_BACKOFF_MS']:g}; the delay only grows, so the maximum may not be smaller than the first"
        )
    if values["_RING"] and values["_CONTEXT"] and values["_RING"] > values["_CONTEXT"]:
        raise ConfigError(
            f"{PREFIX}_RING={values['_RING']} is above {PREFIX}_CONTEXT={values['_CONTEXT']}; "
            "rows outside the context are never drafted from, so set the ring to the context at most"
        )
    policy: Policy = values["_POLICY"]
    for suffix, default, needed in (
        ("_SHADOW_USE", ShadowUse.LOCAL, Policy.SHADOW),
        ("_ON_FAIL", OnFail.TARGET_ONLY, Policy.CAPACITY),
        ("_KEEP_CACHED_BLOCKS", KeepCachedBlocks.AUTO, Policy.CAPACITY),
    ):
        if values[suffix] is not default and policy is not needed:
            raise ConfigError(
                f"{PREFIX}{suffix}={values[suffix].value} means something with {PREFIX}_POLICY={needed.value} only, "
                f"which is {policy.value} here; unset it"
            )
    capture: Path | None = values["_CAPTURE"]
    if capture is not None and not capture.parent.is_dir():
        raise ConfigError(
            f"{PREFIX}_CAPTURE={str(capture)!r}: the folder {capture.parent} does not exist; make it first"
        )
    is_shadow = policy is Policy.SHADOW
    if not is_shadow:
        _check_costs(policy, depth["_DEPTH_POLICY"], depth["_DEPTH_FILE"], values)
    if depth["_SAMPLED_TOP32"]:
        _check_sampled(policy, depth["_DEPTH_POLICY"], depth["_DEPTH_FILE"], capture)
    costs = depth if is_shadow else values
    want_margin = values["_WANT_MARGIN"]
    return EngineConfig(
        endpoints=_with_ucx_dir(_endpoints(values[""], values["_BIND"], values["_SPIN_US"]), values["_UCX_DIR"]),
        policy=policy,
        identity=values["_IDENTITY"],
        markov_identity=values["_MARKOV_IDENTITY"] or _markov_cache_digest(environ),
        token=read_token(values["_TOKEN_FILE"], TOKEN_FILE),
        timeout_s=values["_TIMEOUT_MS"] / 1000,
        connect_timeout_s=values["_CONNECT_TIMEOUT_MS"] / 1000,
        backoff_s=values["_BACKOFF_MS"] / 1000,
        backoff_max_s=values["_BACKOFF_MAX_MS"] / 1000,
        trip=values["_TRIP"],
        cooldown=values["_COOLDOWN"],
        strict_start=values["_STRICT_START"],
        shadow_use=values["_SHADOW_USE"],
        on_fail=values["_ON_FAIL"],
        keep_cached_blocks=values["_KEEP_CACHED_BLOCKS"],
        reclaims_mtp_buffer=values["_RECLAIM_MTP"],
        want_margin=is_shadow if want_margin is None else want_margin,
        context=values["_CONTEXT"],
        ring=values["_RING"],
        fused_gather=values["_FUSED_GATHER"],
        log_every=values["_LOG_EVERY"],
        stats_file=values["_STATS_FILE"] or Path(tempfile.gettempdir()) / f"farspark-stats-{os.getpid()}.json",
        depth_policy=depth["_DEPTH_POLICY"],
        depth_file=depth["_DEPTH_FILE"],
        draft_ms=costs["_DRAFT_MS"],
        round_ms=costs["_ROUND_MS"],
        may_cut_n_out=values["_N_OUT"],
        capture=capture,
        capture_bytes=values["_CAPTURE_MIB"] << 20,
        asynchronous=_asynchronous(policy, values, environ),
        sampled=depth["_SAMPLED_TOP32"],
    )


def _asynchronous(policy: Policy, values: Mapping[str, Any], environ: Mapping[str, str]) -> AsyncSettings | None:
    """Raises ConfigError where asynchronous rounds contradict the rest, and for a watchdog that would end good rounds."""
    if not values["_ASYNC"]:
        return None
    if policy is not Policy.CAPACITY:
        raise ConfigError(
            f"{PREFIX}_ASYNC=1 needs {PREFIX}_POLICY=capacity, which is {policy.value} here: with a local drafter the engine "
            "waits for the remote drafts anyway; unset it, or use capacity"
        )
    if values["_ON_FAIL"] is OnFail.RAISE:
        raise ConfigError(
            f"{PREFIX}_ASYNC=1 contradicts {PREFIX}_ON_FAIL=raise: the host never waits for a round, so it cannot raise for "
            "one; unset one of them"
        )
    timeout_ms, watchdog_ms = values["_TIMEOUT_MS"], values["_ASYNC_WATCHDOG_MS"]
    if 0 < watchdog_ms <= timeout_ms:
        raise ConfigError(
            f"{PREFIX}_ASYNC_WATCHDOG_MS={watchdog_ms:g} is not above {PREFIX}_TIMEOUT_MS={timeout_ms:g}: it would end rounds "
            "that are still in time; set it to 0 for four times the timeout"
        )
    library: Path | None = values["_HOSTFLAG_LIB"]
    if library is not None and not library.is_file():
        raise ConfigError(
            f"{PREFIX}_HOSTFLAG_LIB={str(library)!r}: no such file; unset it to use the packaged build, or make one with "
            "`python -m farspark.native hostflag FILE`"
        )
    return AsyncSettings(
        proxy=values["_ASYNC_PROXY"],
        nap_us=values["_ASYNC_NAP_US"],
        spin_us=values["_ASYNC_SPIN_US"],
        watchdog_s=(watchdog_ms or max(4 * timeout_ms, 200.0)) / 1000,
        respawns=values["_ASYNC_RESPAWNS"],
        respawn_reset_s=values["_ASYNC_RESPAWN_RESET_S"],
        switch_interval_us=values["_SWITCH_INTERVAL_US"],
        library=library,
        loads_modules_eagerly=environ.get("CUDA_MODULE_LOADING", "").strip().upper() == "EAGER",
    )


def _check_sampled(policy: Policy, depth: DepthPolicy, file: Path | None, capture: Path | None) -> None:
    """Raises ConfigError for what sampled drafts contradict."""
    refusals = (
        (
            policy is Policy.SHADOW,
            f"contradicts {PREFIX}_POLICY=shadow: two drafters that draw make different drafts by right, so there is nothing to "
            "compare. Prove parity in shadow without it, then set it with capacity or resilience",
        ),
        (
            depth.mode.masks or file is not None,
            f"contradicts {f'{POLICY}={depth}' if depth.mode.masks else f'{FILE}={str(file)!r}'}: the confidence of a drawn "
            "draft depends on the draws before it, so a depth chosen by all of them would favour some tokens over others, and "
            f"the text would not be the target's own any more. Set {POLICY} to off or fixed:<d> and no {FILE}, or unset it",
        ),
        (
            capture is not None,
            f"contradicts {PREFIX}_CAPTURE={str(capture)!r}: a recording has no probabilities, and a replay could not tell a "
            "draw from a fault. Record without it",
        ),
    )
    for holds, why in refusals:
        if holds:
            raise ConfigError(f"{SAMPLED}=1 {why}")


def _value(setting: _Setting, environ: Mapping[str, str]) -> Any:
    text = environ.get(setting.name, "").strip()
    if not text:
        return setting.default
    try:
        return setting.parse(text)
    except (ValueError, KeyError) as error:
        why = f"{error}; " if setting.explains else ""
        raise ConfigError(f"{setting.name}={text!r}: {why}expected {setting.expected}") from None


def _check_costs(policy: Policy, depth: DepthPolicy, file: Path | None, values: Mapping[str, Any]) -> None:
    """A depth that is priced needs both costs, and none that contains the local drafter's. Raises ConfigError."""
    try:
        refuse_local_table(depth)
    except ValueError as error:
        raise ConfigError(f"{POLICY}={depth} with {PREFIX}_POLICY={policy.value}: {error}") from error
    if file is None and not depth.mode.masks:
        return
    missing = [f"{PREFIX}{suffix}" for suffix in ("_DRAFT_MS", "_ROUND_MS") if values[suffix] is None]
    if not missing:
        return
    asked = f"{POLICY}={depth}" if depth.mode.masks else f"{FILE}={str(file)!r}, which can switch to conf or confb,"
    raise ConfigError(
        f"{asked} with {PREFIX}_POLICY={policy.value} needs both {PREFIX}_DRAFT_MS and {PREFIX}_ROUND_MS; "
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Depth d is priced as ROUND_MS[d] + DRAFT_MS "
        f"with the remote drafter's own figures, because {LOCAL_PREFIX}_ROUND_MS holds the local drafter's time too. Measure "
        f"and set {'it' if len(missing) == 1 else 'them'}, or set {POLICY}=off"
        + ("" if file is None else f" and unset {FILE}")
    )


def _ms_text(ms: tuple[float, ...]) -> str:
    return ",".join(f"{one:g}" for one in ms)


def _endpoints(text: str, bind: str | None, spin_us: int | None) -> tuple[Endpoint, ...]:
    """The endpoints with what is set for all filled in; an endpoint that says otherwise contradicts it."""
    try:
        endpoints = parse_endpoints(text)
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}={text!r}: {error}") from error
    for endpoint in endpoints:
        if bind is not None and endpoint.bind not in ("", bind):
            raise ConfigError(
                f"{PREFIX}_BIND={bind!r} contradicts ?bind={endpoint.bind} of {endpoint}; set only one of them"
            )
        if spin_us is not None and endpoint.spin_us not in (None, spin_us):
            raise ConfigError(
                f"{PREFIX}_SPIN_US={spin_us} contradicts ?spin_us={endpoint.spin_us} of {endpoint}; set only one of them"
            )
    if bind is not None:
        endpoints = tuple(dataclasses.replace(endpoint, bind=bind) for endpoint in endpoints)
    if spin_us is not None:
        endpoints = tuple(dataclasses.replace(endpoint, spin_us=spin_us) for endpoint in endpoints)
    return endpoints


def _with_ucx_dir(endpoints: tuple[Endpoint, ...], directory: str | None) -> tuple[Endpoint, ...]:
    """The endpoints over UCX with `directory` filled in: one process loads one UCX, so none may name another."""
    if directory is None:
        return endpoints
    if not Path(directory).is_absolute() or not any(Path(directory).glob("libucp*.so*")):
        raise ConfigError(
            f"{PREFIX}_UCX_DIR={directory!r}: expected an absolute path of a directory that has libucp.so.0"
        )
    for endpoint in endpoints:
        if endpoint.ucx_dir not in ("", directory):
            raise ConfigError(
                f"{PREFIX}_UCX_DIR={directory!r} contradicts ?ucx_dir={endpoint.ucx_dir} of {endpoint}; set only one of them"
            )
    return tuple(
        dataclasses.replace(endpoint, ucx_dir=directory) if endpoint.scheme in UCX_SCHEMES else endpoint
        for endpoint in endpoints
    )


def _refuse_unknown(environ: Mapping[str, str], prefix: str, settings: tuple[_Setting, ...]) -> None:
    known = [setting.name for setting in settings]
    for name in sorted(environ):
        if name.startswith(prefix + "_") and environ[name].strip() and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{name} is not a setting of this version; the nearest one is {nearest}")


def _markov_cache_digest(environ: Mapping[str, str]) -> bytes:
    path = environ.get(MARKOV_CACHE, "").strip()
    if not path:
        return bytes(32)
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise ConfigError(
            f"{MARKOV_CACHE}={path!r} cannot be read ({error.strerror}); set {PREFIX}_MARKOV_IDENTITY, or unset it"
        ) from error
    return digest.digest()
