"""What drafts were drawn from, in the form in which vLLM's rejection sampler takes it.

vLLM verifies a draft x by p(x) > u · q(x) and resamples from max(p - q, 0), with q = softmax(logits / temperature) of the
drafter's logits, one row of the vocabulary per slot and position. A q that is known on a support only is such a row, too:
temperature · log q there, and minus infinity elsewhere. Where vLLM keeps logits that were divided before, it is log q.
Imports nothing of vLLM.
"""

from __future__ import annotations

import logging

import torch

from farspark.engine.config import SAMPLED
from farspark.engine.shape import ModelShape
from farspark.engine.vllm.remote import RemoteDrafts
from farspark.errors import ConfigError

logger = logging.getLogger(__name__)


class Proposal:
    """float32 `[slots, N, vocabulary]` on the device, the same on every rank; a slot's rows hold until it drafts again.

    `is_shared`: a local drafter writes whole rows of it, too. `is_divided`: the sampler divides by the temperature.
    """

    def __init__(self, shape: ModelShape, device: torch.device, *, is_shared: bool, is_divided: bool) -> None:
        """Raises ConfigError where the device has no room for it."""
        dimensions = shape.slots, shape.num_drafts, shape.vocab_size
        size = 4 * shape.slots * shape.num_drafts * shape.vocab_size
        try:
            self.logits = torch.full(dimensions, float("-inf"), dtype=torch.float32, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{SAMPLED}=1 needs {size >> 20} MiB on {device} for what drafts are drawn from ({shape.slots} slots x "
                f"{shape.num_drafts} drafts x {shape.vocab_size} ids x 4 bytes), and there is no room: {error}. Start with a "
                "smaller --max-num-seqs, or unset it"
            ) from error
        # Columns that are not minus infinity, where nobody else writes.
        self._columns = torch.zeros((*dimensions[:2], shape.support), dtype=torch.int64, device=device)
        self._steps = torch.arange(shape.num_drafts, device=device)[None, :, None]
        self._is_shared = is_shared
        self._is_divided = is_divided
        logger.info(
            "farspark: sampled drafts: %.1f MiB on %s for what they are drawn from (%d slots x %d drafts x %d ids x 4 bytes)",
            self.nbytes / 2**20,
            device,
            *dimensions,
        )

    @property
    def support(self) -> int:
        """Ids that a remote draft is drawn from."""
        return self._columns.shape[2]

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + self._columns.nbytes

    def put(self, slots: torch.Tensor, drafts: RemoteDrafts, temperature: torch.Tensor) -> None:
        """Take note of what the drafts of a step were drawn from; `slots` int [n], `temperature` float32 [slots].

        A row whose drafts were not drawn has its tokens for certain. For a greedy request that is not read; for one that has no
        drafts it is true, too: whatever place-holders stand there are the same whatever is drawn, and are verified as such.
        """
        assert drafts.sampled is not None
        assert drafts.support is not None
        assert drafts.q is not None
        rows = slots.long()[:, None, None]
        is_drawn = drafts.sampled[:, None, None] != 0
        columns = torch.where(is_drawn, drafts.support, drafts.tokens[:, :, None]).long()
        logits = drafts.q.log()
        if self._is_divided:
            logits = logits * temperature[slots.long()][:, None, None]
        values = torch.where(is_drawn, logits, 0.0)
        if self._is_shared:
            # Of rows without remote drafts the local drafter's own stay. Waits for the device, as this policy's rounds do.
            mine = drafts.ok.nonzero().squeeze(1)
            rows, columns, values = rows[mine], columns[mine], values[mine]
            self.logits[rows[:, 0, 0]] = float("-inf")
        else:
            self.logits[rows, self._steps, self._columns[rows[:, 0, 0]]] = float("-inf")
            self._columns[rows[:, 0, 0]] = columns
        self.logits[rows, self._steps, columns] = values
