"""The stats file: JSON that is either the old snapshot or the new one, never half of either."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class StatsFile:
    """Owned by the engine thread. A disk that is full or read-only is said once and costs nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_failed = False

    def write(self, snapshot: Mapping[str, Any]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(snapshot, file, indent=1)
                file.write("\n")
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._has_failed:
                logger.warning("stats file %s cannot be written (%s); statistics stay in memory", self.path, error)
            self._has_failed = True
        else:
            self._has_failed = False
