"""The worker's settings: parsed once by the command line, checked here as a whole, frozen, handed down."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from farspark.errors import ConfigError
from farspark.transport.endpoint import Endpoint
from farspark.wire import layout

DTYPES: Final = ("bfloat16", "float32")
FOLLOW: Final = ("vllm", "training")
QUANTISATIONS: Final = ("plain", "reference")
DEFAULT_LISTEN: Final = Endpoint("tcp", "127.0.0.1", 18620)
MAX_SLOTS: Final = layout.MAX_REQUESTS
MAX_CONNECTIONS: Final = 4096
MAX_LEASE_S: Final = 6553.0  # a welcome holds tenths of a second in 16 bits

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Every field has the name of its option: `num_drafts` is `--drafts`. Raises ConfigError on a value out of range."""

    checkpoint: Path
    listen: Endpoint = DEFAULT_LISTEN
    target: Path | None = None  # where the drafter takes the tensors that it shares with its target
    device: str = "cpu"
    dtype: str = "bfloat16"
    slots: int = 8  # requests whose context is held at a time, all engines together
    context: int = 4096  # positions kept per slot
    num_drafts: int | None = None  # N; None: the checkpoint's own
    follow: str = "vllm"  # whose reading of a checkpoint counts where vLLM's and that of training differ
    quantisation: str = "plain"  # what DeepSeek's stages do with activations and context
    max_rows: int = 4096  # rows per STEP, all requests together
    max_connections: int = 64
    name: str = "farspark"  # what the worker calls itself in HELLO and STATS
    lease_s: float = 60.0  # seconds that a session may be silent; 0: for ever
    drain_s: float = 10.0  # seconds that engines get to move elsewhere at shutdown, and then the rounds in hand
    token: bytes | None = field(default=None, repr=False)  # what --token-file holds; None: whoever connects is served
    allow_unauthenticated_network: bool = False
    ready_file: Path | None = None  # receives the endpoint in use, atomically, once the worker is ready

    def __post_init__(self) -> None:
        _in_range("--slots", self.slots, 1, MAX_SLOTS)
        _in_range("--context", self.context, 1, layout.MAX_POSITION)
        if self.num_drafts is not None:
            _in_range("--drafts", self.num_drafts, 1, layout.MAX_DRAFTS)
        _in_range("--max-rows", self.max_rows, 1, layout.MAX_FRAME_BYTES)
        _in_range("--max-connections", self.max_connections, 1, MAX_CONNECTIONS)
        if self.lease_s and not 0.1 <= self.lease_s <= MAX_LEASE_S:
            raise ConfigError(
                f"--lease-s {self.lease_s:g}: expected seconds, 0.1 to {MAX_LEASE_S:g}, or 0 for sessions that never run out"
            )
        if not 0 <= self.drain_s <= 3600:
            raise ConfigError(f"--drain-s {self.drain_s:g}: expected seconds, 0 to 3600")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device {self.device!r}: expected cpu, cuda or cuda:0, cuda:1, ...")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r}: expected {' or '.join(DTYPES)}")
        if self.follow not in FOLLOW:
            raise ConfigError(f"--follow {self.follow!r}: expected {' or '.join(FOLLOW)}")
        if self.quantisation not in QUANTISATIONS:
            raise ConfigError(f"--quantisation {self.quantisation!r}: expected {' or '.join(QUANTISATIONS)}")
        if not self.name or len(self.name.encode()) > layout.MAX_NAME_BYTES:
            raise ConfigError(f"--name {self.name!r}: expected 1 to {layout.MAX_NAME_BYTES} bytes")
        if not self.listen.is_loopback and self.token is None and not self.allow_unauthenticated_network:
            raise ConfigError(
                f"--listen {self.listen}: not a loopback address, and this worker has no token: whoever reaches the port "
                "can use it. Give it a token with --token-file (`openssl rand -hex 32 > FILE`, chmod 600), listen on "
                "127.0.0.1, or add --allow-unauthenticated-network if only trusted hosts reach it"
            )

    def rows_per_step(self, row_bytes: int) -> int:
        """`max_rows`, or as many rows as a frame may hold if that is less."""
        return min(self.max_rows, (layout.MAX_FRAME_BYTES - _HEAD_BYTES) // row_bytes)

    def frame_bytes(self, row_bytes: int) -> int:
        """The largest frame that a peer which keeps to the limits can send."""
        return max(_HEAD_BYTES + self.rows_per_step(row_bytes) * row_bytes, layout.MAX_GREETING_BYTES)


# Everything of the largest STEP in front of its rows.
_HEAD_BYTES = layout.HEADER.size + layout.STEP.size + layout.MAX_REQUESTS * layout.ENTRY.size


def _in_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{option} {value}: expected {low} to {high}")
