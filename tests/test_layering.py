"""Who may import whom: every import counts, also inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "farspark"

# Rooms, the most specific prefix wins. A file in no room is an error: it has not been decided where it belongs.
CORE = {"errors", "clock", "stats"}
ENGINE_CORE = {
    f"engine.{name}"
    for name in (
        "breaker",
        "config",
        "depth",
        "depth_control",
        "draws",
        "slots",
        "result",
        "shadow",
        "shape",
        "stats_file",
    )
}
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    "__main__": {"cli"},
    "errors": set(),
    "clock": {"errors"},
    "stats": {"errors", "clock"},
    "token_file": {"errors"},
    "wire": {"errors", "wire"},
    "native": {"errors", "native"},
    "transport": {"errors", "clock", "transport"},
    "transport.tcp": {"errors", "clock", "transport", "native.round_calls"},
    "transport.ucx": {"errors", "clock", "transport", "native.build", "native.round_calls", "native.ucx"},
    "engine": set(),
    "engine.config": {"errors", "token_file", "transport.endpoint", "engine.depth"},
    "engine.depth": set(),
    "engine.depth_control": CORE | {"engine.depth"},
    "engine.launch": {"errors", "engine.config", "transport.endpoint"},
    "engine.breaker": set(),
    "engine.cuda_driver": {"errors", "native"},
    "engine.slots": CORE | {"wire"},
    "engine.draws": {"wire"},
    "engine.replies": {"native.round_calls", "wire"},
    "engine.result": CORE | {"wire"},
    "engine.accepted_lengths": set(),
    "engine.shadow": CORE | {"wire", "engine.accepted_lengths"},
    "engine.shape": CORE | {"wire"},
    "engine.stats_file": CORE,
    "engine.route": {"transport.endpoint"},
    "engine.greeting": {"errors", "wire"},
    "engine.client": CORE
    | {"native.round_calls", "wire", "transport", "engine.config", "engine.greeting", "engine.route"},
    "engine.round": CORE | {"wire", "engine.client", "engine.replies", "engine.route"} | ENGINE_CORE,
    "engine.capture": CORE | ENGINE_CORE | {"wire", "engine.round"},
    "engine.replay": CORE | ENGINE_CORE | {"wire", "transport", "engine.capture", "engine.client", "engine.round"},
    "engine.gather": CORE | ENGINE_CORE | {"native", "engine.cuda_driver", "engine.gather", "engine.round"},
    "engine.talker": CORE | ENGINE_CORE | {"wire", "transport", "engine.capture", "engine.client", "engine.round"},
    "engine.handoff": CORE
    | ENGINE_CORE
    | {"native", "engine.cuda_driver", "engine.handoff", "engine.round", "engine.talker"},
    # What a proxy runs has nothing of a device in reach.
    "engine.handoff.region": ENGINE_CORE | {"engine.round"},
    "engine.handoff.gate": {"engine.handoff.region"},
    "engine.handoff.proxy": CORE
    | ENGINE_CORE
    | {"native", "engine.handoff.ordinary", "engine.handoff.region", "engine.round", "engine.talker"},
    "engine.handoff.ordinary": {"native", "engine.client", "engine.handoff.region", "engine.round", "engine.talker"},
    "engine.handoff.child": CORE | {"native", "engine.handoff.proxy", "engine.handoff.region", "engine.talker"},
    "engine.handoff.thread": CORE
    | {
        "native",
        "engine.config",
        "engine.handoff.gate",
        "engine.handoff.proxy",
        "engine.handoff.region",
        "engine.talker",
    },
    "engine.handoff.process": CORE
    | {
        "native",
        "engine.config",
        "engine.handoff.child",
        "engine.handoff.gate",
        "engine.handoff.region",
        "engine.talker",
        "",
    },
    "engine.vllm": CORE
    | ENGINE_CORE
    | {
        "wire",
        "engine.capture",
        "engine.client",
        "engine.round",
        "engine.talker",
        "engine.gather",
        "engine.handoff",
        "engine.vllm",
        "",
    },
    "engine.vllm.pp": {
        "errors",
        "engine.config",
        "engine.cuda_driver",
        "engine.vllm.pp",
        "engine.vllm.logs",
        "engine.vllm.warmup",
    },
    "worker": set(),
    "worker.config": CORE | {"transport.endpoint", "wire.layout"},
    "worker.batch": set(),
    "worker.session": CORE | {"native.round_calls", "wire", "worker.batch"},
    "worker.turns": {"worker.batch", "worker.session"},
    "worker.greeting": {"wire", "worker.batch"},
    "worker.connection": {"transport.base", "wire", "worker.session"},
    "worker.tally": CORE | {"transport.base", "wire", "worker.connection", "worker.session"},
    "worker.answers": CORE
    | {"native.round_calls", "transport.base", "wire"}
    | {"worker.batch", "worker.config", "worker.connection", "worker.greeting", "worker.session", "worker.tally"}
    | {"worker.turns"},
    "worker.server": CORE
    | {"transport", "wire"}
    | {"worker.answers", "worker.batch", "worker.config", "worker.connection", "worker.tally"},
    "worker.checkpoint": CORE | {"worker.batch", "worker.checkpoint"},
    "worker.context": CORE | {"worker.batch", "worker.memory"},
    "worker.device": CORE | {"worker.context", "worker.graphs", "worker.models", "worker.ring_attention"},
    "worker.drafter": CORE
    | {"worker.batch", "worker.checkpoint", "worker.context", "worker.device", "worker.graphs", "worker.memory"}
    | {"worker.models"},
    "worker.graphs": set(),
    "worker.memory": CORE,
    "worker.models": CORE | {"worker.checkpoint", "worker.models"},
    "worker.ring_attention": set(),
    "probe": CORE | {"wire", "transport", "probe"},
    "mock": CORE | {"wire", "transport", "worker.batch", "worker.config", "worker.server", "mock"},
    "check": CORE | {"check"},
    "demo": CORE | {"demo", ""},
    "cli": {
        "",
        "errors",
        "clock",
        "stats",
        "token_file",
        "wire",
        "transport",
        "engine",
        "worker",
        "probe",
        "mock",
        "check",
        "demo",
        "cli",
    },
}
# What only some rooms may touch outside of ours; a parent package covers what is below it.
ONLY_IN: dict[str, set[str]] = {
    "vllm": {"engine.vllm"},
    "torch": {
        "engine.gather",
        "engine.vllm",
        "worker.checkpoint",
        "worker.context",
        "worker.device",
        "worker.drafter",
        "worker.graphs",
        "worker.memory",
        "worker.models",
        "worker.ring_attention",
    },
    "numpy": {
        *ENGINE_CORE,
        "engine.capture",
        "engine.replay",
        "engine.replies",
        "engine.round",
        "engine.talker",
        "engine.gather",
        "engine.handoff",
        "engine.vllm",
        "worker.drafter",
        "worker.context",
        "worker.models",
        "worker.checkpoint",
    },
    "safetensors": {"worker.checkpoint"},
    "socket": {"transport.tcp", "transport.ucx", "transport.addresses", "mock.relay"},
    "threading": {
        "transport",
        "engine.capture",
        "engine.client",
        "engine.handoff",
        "engine.stats_file",
        "worker.answers",
        "worker.connection",
        "worker.server",
        "worker.tally",
        "worker.turns",
        "mock.relay",
        "check.run",
        "cli",
        "demo",
        "engine.vllm",
        "probe.metrics",
    },
    "rich": {"cli", "demo"},
    "argparse": {"cli", "engine.vllm.versions"},
    "transformers": {"demo"},
    "httpx": {"demo"},
    "farspark_vllm_cpu_engine": {"demo"},
    "farspark_smollm2_drafter": {"demo"},
    "ctypes": {
        "native",
        "engine.cuda_driver",
        "engine.handoff.cuda_stream",
        "engine.handoff.stream",
        "transport.ucx",
    },
    "triton": {
        "engine.gather.triton_gather",
        "worker.models.fused",
        "worker.models.fused_latent",
        "worker.models.fused_products",
        "worker.models.fused_routing",
        "worker.models.fused_streams",
        "worker.models.packed_experts",
        "worker.ring_attention",
    },
}
PURE = {"wire": {"socket", "threading", "time", "logging", "asyncio", "os"}}


def module_name(path: Path, src: Path = SRC) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room_of(name: str, rooms: set[str]) -> str | None:
    """The longest room that `name` lies in; the package itself is the room ""."""
    while name and name not in rooms:
        name = name.rpartition(".")[0]
        if not name:
            return None
    return name


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of everything imported; `from package import name` yields both package and package.name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["farspark", *(module.split(".") if module else [])]
                up = node.level - (1 if is_package else 0)
                parts = parts[: len(parts) - up] if up else parts
                base = ".".join([*parts, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    room = room_of(module, set(MAY_IMPORT))
    if room is None:
        return [f"{module}: no room"]
    found = []
    for name in imports(source, module, is_package):
        top = name.split(".")[0]
        if top == "farspark":
            target = name.removeprefix("farspark").removeprefix(".")
            # `from farspark.x import Name` names an attribute: judge it as what holds it.
            allowed = MAY_IMPORT[room]
            if target == module or room_of(target, allowed) is not None:
                continue
            if target == "" and ("" in allowed or any(part for part in allowed)):
                continue
            if any(one == target or one.startswith(target + ".") for one in allowed):
                continue  # the package on the way to an allowed module
            found.append(f"{module}: imports {name}")
        elif top in ONLY_IN and room_of(module, ONLY_IN[top]) is None:
            found.append(f"{module}: imports {top}")
        elif top in PURE.get(module.split(".")[0], set()):
            found.append(f"{module}: imports {top}, its room is pure")
    return found


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: module_name(path) or "farspark")
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.codec", "import socket"),
        ("wire.codec", "from farspark.transport import connect"),
        ("transport.tcp", "from farspark.wire import codec"),
        ("engine.round", "from farspark.worker.session import Session"),
        ("engine.round", "def f():\n    import torch"),
        ("engine.client", "from farspark import worker"),
        ("engine.client", "from .. import worker"),
        ("engine.slots", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("engine.slots", "from farspark.engine.vllm import plugin"),
        ("engine.gather.ring", "import vllm.config"),
        ("engine.launch", "from farspark.engine.round import RemoteRound"),
        ("engine.handoff.handoff", "import torch"),
        ("engine.handoff.proxy", "import triton"),
        ("engine.handoff.proxy", "import ctypes"),
        ("engine.handoff.proxy", "from farspark.engine.handoff.cuda_stream import CudaStream"),
        ("engine.handoff.child", "from farspark.engine.handoff import handoff"),
        ("engine.handoff.region", "from farspark.engine.gather.torch_gather import TorchGather"),
        ("worker.session", "import torch"),
        ("worker.drafter", "from farspark.wire import layout"),
        ("worker.server", "from farspark.engine.config import EngineConfig"),
        ("worker.server", "from farspark.cli import main"),
        ("worker.answers", "from farspark.transport import listen"),
        ("worker.tally", "from farspark.worker.answers import Answers"),
        ("cli.mock_worker", "import socket"),
        ("mock.relay", "from farspark.engine.client import Client"),
        ("stats", "from farspark.wire import layout"),
        ("helpers", "x = 1"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert faults(source, module) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.client", "from farspark.transport import connect"),
        ("engine.round", "from farspark.wire.layout import EntryFlag"),
        ("transport.tcp", "import socket"),
        ("worker.drafter", "import torch"),
        ("engine.vllm.plugin", "import vllm"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert faults(source, module) == []


def test_importing_the_package_the_wire_and_the_engine_core_loads_neither_torch_nor_vllm() -> None:
    modules = (
        "farspark, farspark.wire.codec, farspark.engine.round, farspark.engine.handoff.handoff, farspark.worker.server, "
        "farspark.cli.main"
    )
    probe = f"import sys; import {modules}; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_wire_needs_the_standard_library_only() -> None:
    blocked = "import sys; sys.modules['numpy'] = None; sys.modules['torch'] = None; import farspark.wire.codec"
    subprocess.run([sys.executable, "-c", blocked], check=True)
