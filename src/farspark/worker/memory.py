"""How much memory a device has left, and whether a drafter fits into it, known before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import torch

from farspark.errors import ConfigError

# Left free beside weights and context: activations of a step, and the allocator's own rounding.
HEADROOM_BYTES = 256 << 20


def require_memory(what: str, byte_count: int, device: torch.device, remedy: str) -> None:
    """Raise ConfigError if `byte_count` more would not fit in what is free; say nothing where that is not known."""
    free = free_bytes(device)
    if free is not None and byte_count > free:
        raise ConfigError(f"{what} takes {byte_count:,} bytes on {device}, and {free:,} bytes are free; {remedy}")


def free_bytes(device: torch.device) -> int | None:
    """Free memory of `device`; None when nothing tells."""
    host = host_free_bytes()
    if device.type != "cuda":
        return host
    try:
        free, total = torch.cuda.mem_get_info(device)
        is_shared = bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
    except (RuntimeError, AssertionError, OSError):
        return host
    return free_of_gpu(free, total, host, is_shared=is_shared)


def free_of_gpu(free: int, total: int, host: int | None, *, is_shared: bool) -> int | None:
    """`free` and `total` as the driver has them, and what `host` has left.

    Of memory that a GPU shares with the host (GB10) the driver tells nothing, or only a part: the cache of files, which a
    checkpoint that was just read fills, is not free to it, though it gives way. What the kernel calls available counts there.
    """
    if total <= 0:
        return host
    return max(free, host or 0) if is_shared else free


def host_free_bytes(
    meminfo: str = "/proc/meminfo", membership: str = "/proc/self/cgroup", groups: str = "/sys/fs/cgroup"
) -> int | None:
    """What the kernel calls available, or what is left of this container's or service's own limit if that is less."""
    known = [free for free in (_available(meminfo), _left_of_limits(membership, Path(groups))) if free is not None]
    return min(known, default=None)


def _available(meminfo: str) -> int | None:
    try:
        with open(meminfo, encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _left_of_limits(membership: str, mount: Path) -> int | None:
    """The least that this process's control group (v2) and those around it leave; None where nothing is limited.

    Past the limit the kernel kills without a word, however much the machine has left.
    """
    try:
        lines = Path(membership).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return None
    group = mount / own
    left = [_left_of_limit(one) for one in (group, *group.parents) if one.is_relative_to(mount)]
    return min((free for free in left if free is not None), default=None)


def _left_of_limit(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # The cache of files, the checkpoint's own among them, gives way.
        cache = int(stat["active_file"]) + int(stat["inactive_file"])
        return max(0, int(limit) - used + cache)
    except (OSError, ValueError, KeyError):
        return None
