"""The depth policy in force: that of the settings, or of a depth file that is read again whenever it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farspark.engine.depth import (
    FILE,
    OFF,
    Costs,
    DepthPolicy,
    Mode,
    choose_depths,
    policy_from_file,
    refuse_local_table,
    resolve,
)
from farspark.stats import Stats

logger = logging.getLogger(__name__)

# More than any policy is long; a file beyond that is another file.
_MAX_FILE_BYTES = 65536


class DepthControl:
    """Owned by the thread that runs rounds; rank 0 only, so that one file is read once and all ranks obey one reading."""

    def __init__(
        self,
        policy: DepthPolicy = OFF,
        *,
        num_drafts: int,
        costs: Costs | None = None,
        file: Path | None = None,
        stats: Stats | None = None,
    ) -> None:
        """Raises ValueError where `policy` does not fit an engine of N drafts."""
        self._num_drafts = num_drafts
        self._costs = costs
        self._file = file
        self._stats = stats or Stats()
        self._seen: tuple[int, ...] | str | None = None  # the file at the last look, or why there was none
        self._source = "settings"
        self._last_error: str | None = None
        self._chosen = [0] * (num_drafts + 1)
        # The remote costs replace a table of the settings, which may hold the local drafter's time too.
        self._resolved = resolve(policy, num_drafts, costs, own_table=False)

    def choose(
        self, confidences: npt.NDArray[np.floating[Any]], is_usable: npt.NDArray[np.bool_], limit: int
    ) -> list[int]:
        """[n] drafts to verify; see `choose_depths`."""
        depths = choose_depths(self._resolved, confidences.tolist(), is_usable.tolist(), limit)
        for depth in depths:
            self._chosen[depth] += 1
        return depths

    def choose_for_all(self, n: int, limit: int) -> int | None:
        """The same for n requests that all have drafts; None where it depends on confidences."""
        depth = self._for_all(limit)
        if depth is not None:
            self._chosen[depth] += n
        return depth

    def foresee_for_all(self, limit: int) -> int | None:
        """What `choose_for_all` will say in the next round; None also where a file may have another word in it."""
        return self._for_all(limit) if self._file is None else None

    def _for_all(self, limit: int) -> int | None:
        policy = self._resolved.policy
        if policy.mode is not Mode.OFF and policy.mode is not Mode.FIXED:
            return None
        return min(limit, policy.depth) if policy.mode is Mode.FIXED else limit

    @property
    def without_confidences(self) -> int:
        """How many drafts of a request to verify when nothing is known about them."""
        policy = self._resolved.policy
        return policy.depth if policy.mode is Mode.FIXED else self._num_drafts

    def look(self) -> None:
        """Read the depth file if it changed. A bad one is said and counted, once per change, and the last good policy stays."""
        file = self._file
        if file is None:
            return
        try:
            found = os.stat(file)
            seen: tuple[int, ...] | str = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError as error:
            seen = error.strerror or type(error).__name__
        if seen == self._seen:
            return
        self._seen = seen
        self._stats.add("depth_file_changes")
        try:
            if isinstance(seen, str):
                raise ValueError(seen)
            policy = policy_from_file(_read(file))
            refuse_local_table(policy)
            self._resolved = resolve(policy, self._num_drafts, self._costs, own_table=True)
        except (OSError, ValueError) as error:
            self._last_error = str(error)
            self._stats.add("depth_file_errors")
            logger.warning("farspark: %s=%s: %s; %s stays in force", FILE, file, error, self._resolved.policy)
        else:
            self._last_error = None
            self._source = str(file)
            logger.info("farspark: depth policy %s, from %s", policy, file)

    def snapshot(self) -> dict[str, Any]:
        return {
            "policy": str(self._resolved.policy),
            "source": self._source,
            "ms_by_depth": [round(one, 4) for one in self._resolved.ms] or None,
            "chosen": list(self._chosen),  # requests by the depth that was chosen for them
            "last_file_error": self._last_error,
        }

    def __repr__(self) -> str:
        return f"<DepthControl {self._resolved.policy} from {self._source}>"


def _read(file: Path) -> str:
    with open(file, "rb") as opened:
        text = opened.read(_MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise ValueError(f"more than {_MAX_FILE_BYTES} bytes")
    return text.decode("utf-8")
