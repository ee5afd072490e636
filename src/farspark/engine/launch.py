"""Launch configs: files of KEY=VALUE lines that say how an engine is started, and where each value in force comes from.

Pure: text and an environment in, values out. The file's values are defaults: a variable that exists in the environment wins,
an empty one too, so that `VLLM_DSPARK_REMOTE= farspark run …` starts without the remote whatever the file says.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from farspark.engine.config import (
    DEPTH_SETTINGS,
    FULL_ATTENTION_CONTEXT,
    FULL_ATTENTION_RING,
    MARKOV_CACHE,
    PP_ALIASES,
    PP_PREFIX,
    PP_SETTINGS,
    PREFIX,
    SETTINGS,
    EngineConfig,
    PpConfig,
    read_config,
    read_pp_config,
)
from farspark.errors import ConfigError
from farspark.transport.endpoint import DEFAULT_CONNECT_SPIN_US

PLUGINS: Final = "VLLM_PLUGINS"
RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
PLUGIN: Final = "farspark"  # the name of our entry point

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_REFERENCE: Final = re.compile(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")
_DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Assignment:
    """One line of a launch config."""

    name: str
    value: str  # without quotes, references not filled in
    is_literal: bool  # in single quotes: `${` means itself
    place: str  # FILE:LINE


@dataclass(frozen=True, slots=True)
class Row:
    """One value in force."""

    name: str
    value: str
    origin: str  # FILE:LINE, "environment", or "default"


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch config and an environment put together, and checked."""

    environ: Mapping[str, str]  # what the command is started with
    config: EngineConfig | None  # None: no endpoint, nothing is remote
    pp: PpConfig | None  # None: a pipeline's tokens go vLLM's own way
    origins: Mapping[str, str]  # by name, for everything that the file names; FILE:LINE or "environment"
    overridden: tuple[Assignment, ...]  # lines that the environment won over

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Settings that say something, though no endpoint is set."""
        if self.config is not None:
            return ()
        depth = {setting.name for setting in DEPTH_SETTINGS}
        return tuple(
            name
            for name in sorted(self.environ)
            if (name.startswith(f"{PREFIX}_") or name in depth) and self.environ[name].strip()
        )


def parse_launch(text: str, file: str) -> tuple[Assignment, ...]:
    """The assignments of a launch config. Raises ConfigError with `file`, the line's number and what is wrong with it."""
    found: dict[str, Assignment] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        assignment = _parse_line(stripped, f"{file}:{number}")
        if (first := found.get(assignment.name)) is not None:
            raise ConfigError(
                f"{assignment.place}: {assignment.name} is set in {first.place} already; keep one of them"
            )
        found[assignment.name] = assignment
    return tuple(found.values())


def _parse_line(line: str, place: str) -> Assignment:
    match = _ASSIGNMENT.fullmatch(line)
    if match is None:
        raise ConfigError(
            f"{place}: {line!r} is not KEY=VALUE; expected a name, '=' without spaces around it, and a value"
        )
    name, value = match.groups()
    if value != value.lstrip():
        raise ConfigError(f"{place}: {line!r} has a space after '='; leave it out, or quote the value")
    if "\0" in value:
        raise ConfigError(f"{place}: the value of {name} has a null character, which no environment can hold")
    quote = value[:1]
    if quote not in ("'", '"'):
        if re.search(r"\s#", value):
            raise ConfigError(
                f"{place}: {line!r} has a '#' in its value; put a comment on a line of its own, or quote it"
            )
        return Assignment(name, value, False, place)
    inner = value[1:-1]
    if len(value) < 2 or value[-1] != quote or quote in inner:
        raise ConfigError(
            f"{place}: {line!r} has a quote without its match; expected nothing after the closing {quote}"
        )
    return Assignment(name, inner, quote == "'", place)


def prepare(assignments: tuple[Assignment, ...], environ: Mapping[str, str]) -> Launch:
    """What the command would be started with. Raises ConfigError for a reference to nothing and for a bad setting."""
    merged, origins, overridden = dict(environ), {}, []
    # A way back must not ask for what only the way forth needs.
    is_off = PREFIX in environ and not environ[PREFIX].strip()
    for assignment in assignments:
        if assignment.name in environ:
            origins[assignment.name] = "environment"
            overridden.append(assignment)
        else:
            origins[assignment.name] = assignment.place
            is_without_effect = is_off and assignment.name.startswith(f"{PREFIX}_")
            merged[assignment.name] = _filled_in(assignment, environ, may_lack=is_without_effect)
    try:
        config, pp = read_config(merged), read_pp_config(merged)
    except ConfigError as error:
        raise ConfigError(_with_place(str(error), origins)) from error
    return Launch(merged, config, pp, origins, tuple(overridden))


def _filled_in(assignment: Assignment, environ: Mapping[str, str], *, may_lack: bool) -> str:
    """The value with its references filled in, empty where one `may_lack`. Raises ConfigError."""
    if assignment.is_literal:
        return assignment.value

    def value_of(reference: re.Match[str]) -> str:
        name = reference[1]
        if name is None:
            raise ConfigError(
                f"{assignment.place}: {assignment.name}={assignment.value}: expected ${{NAME}}, or single quotes around it"
            )
        if not environ.get(name, "").strip() and not may_lack:
            raise ConfigError(
                f"{assignment.place}: {assignment.name} needs ${{{name}}}, which is not set; export {name}=…"
            )
        return environ.get(name, "")

    return _REFERENCE.sub(value_of, assignment.value)


def _with_place(message: str, origins: Mapping[str, str]) -> str:
    """`message` preceded by where the setting was set that it begins with."""
    name = re.match(r"\w*", message)
    place = origins.get(name[0]) if name else None
    return f"{place}: {message}" if place else message


def refuse_unloadable(launch: Launch) -> None:
    """Raises ConfigError where vLLM would start, but without Farspark or without DSpark."""
    runner = launch.environ.get(RUNNER, "").strip().lower()
    if runner in ("0", "false", "off", "no"):
        raise ConfigError(
            f"{RUNNER}={runner} ({_origin(launch, RUNNER)}) selects the V1 model runner, which has no DSpark; set it to 1"
        )
    # vLLM splits at commas and strips nothing, and an empty list lets no plugin in.
    plugins = launch.environ.get(PLUGINS)
    asked = PREFIX if launch.config is not None else f"{PP_PREFIX}_…" if launch.pp is not None else None
    if asked is not None and plugins is not None and PLUGIN not in plugins.split(","):
        raise ConfigError(
            f"{PLUGINS}={plugins!r} ({_origin(launch, PLUGINS)}) keeps vLLM from loading Farspark, and {asked} would be "
            f"ignored without a word; unset it, or add {PLUGIN} to it, separated by a comma without spaces"
        )


def explain(launch: Launch) -> Iterator[Row]:
    """Every value in force: first all settings of the engine's side, then whatever else the file sets."""
    settings = (*SETTINGS, *DEPTH_SETTINGS)
    names = [setting.name for setting in settings]
    if launch.config is not None:
        for setting in settings:
            text = launch.environ.get(setting.name, "").strip()
            if text:
                yield Row(setting.name, text, _origin(launch, setting.name))
            else:
                yield Row(setting.name, _default_text(setting.suffix, setting.default, launch.config), _DEFAULT)
    else:
        what = "Farspark is inert" if launch.pp is None else "nothing is remote"
        yield Row(PREFIX, f"not set: {what}", _origin(launch, PREFIX))
    others = (MARKOV_CACHE, RUNNER, PLUGINS, *(setting.name for setting in PP_SETTINGS), *PP_ALIASES.values())
    for name in dict.fromkeys([*launch.origins, *others]):
        if name not in names and name in launch.environ:
            yield Row(name, launch.environ[name], _origin(launch, name))


def _origin(launch: Launch, name: str) -> str:
    return launch.origins.get(name) or ("environment" if name in launch.environ else _DEFAULT)


def _default_text(suffix: str, default: Any, config: EngineConfig) -> str:
    computed = {
        "_MARKOV_IDENTITY": config.markov_identity.hex() if any(config.markov_identity) else "not checked",
        "_WANT_MARGIN": _text(config.want_margin),
        "_N_OUT": "auto",
        "_ASYNC_WATCHDOG_MS": "0"
        if config.asynchronous is None
        else f"0: {config.asynchronous.watchdog_s * 1000:g} with this timeout",
        "_CONTEXT": f"the drafter's window; full attention: {FULL_ATTENTION_CONTEXT}",
        "_RING": f"the drafter's window; full attention: {FULL_ATTENTION_RING}",
        "_SPIN_US": f"{DEFAULT_CONNECT_SPIN_US}, where an endpoint does not say ?spin_us=",
        # Rank 0 need not be the process that is started here.
        "_STATS_FILE": f"{config.stats_file.parent}/farspark-stats-PID.json",
    }
    return computed.get(suffix) or ("not set" if default is None else _text(default))


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
