"""Rank 0 of a capacity engine: a real `RemoteDrafter`, two requests of three tokens a step. What it broadcasts is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.fakes.drafters import info
from tests.fakes.host_stream import HostStream
from torch import Tensor

from farspark.engine.config import read_config
from farspark.engine.gather.torch_gather import StepTensors
from farspark.engine.shape import ModelShape
from farspark.engine.vllm.remote import Admissions, Batch, RemoteDrafter, RemoteDrafts, TpGroup

INFO = info(context=16, slots=4)
N, SLOTS, QUERY = INFO.num_drafts, INFO.slots, 3


class TwoRequests:
    """The requests lie in `slots`; `settings` are given without VLLM_DSPARK_, an empty one is not set."""

    def __init__(
        self,
        endpoint: str,
        stats_file: Path,
        settings: Mapping[str, str],
        *,
        slots: Sequence[int] = (0, 1),
        ranks: int = 1,
        support: int = 0,
        make_stream: Callable[..., Any] = lambda region, page: HostStream(page),
    ) -> None:
        self.stats_file = stats_file
        environ = {
            "REMOTE": endpoint,
            "REMOTE_IDENTITY": INFO.identity.hex(),
            "REMOTE_POLICY": "capacity",
            "REMOTE_STRICT_START": "1",
            "REMOTE_STATS_FILE": str(stats_file),
            **settings,
        }
        config = read_config({f"VLLM_DSPARK_{name}": value for name, value in environ.items() if value})
        assert config is not None
        admissions = Admissions()
        for slot in range(SLOTS):
            admissions.admit(slot, f"request-{slot}")
        self.slots = list(slots)
        self.sent: list[Tensor] = []
        self.drafter = RemoteDrafter(
            config,
            ModelShape(
                num_drafts=N,
                vocab_size=INFO.vocab_size,
                hidden_size=INFO.hidden_size,
                taps=INFO.taps,
                slots=SLOTS,
                context=16,
                ring=16,
                max_position=1 << 20,
                support=support,
            ),
            max_tokens=32,
            device=torch.device("cpu"),
            tp=TpGroup(0, ranks, lambda tensor: self.sent.append(tensor.clone())),
            admissions=admissions,
            engine="test",
            facts={},
            make_stream=make_stream,
        )
        self.drafter.start_serving()
        self.end = 0  # the next step's first position, of both

    def take_step(self, hidden: list[Tensor], **sampling: Tensor) -> RemoteDrafts:
        """`hidden`: of each tap, the first request's QUERY rows and then the second's."""
        positions = [*range(self.end, self.end + QUERY)]
        self.drafter.begin(
            StepTensors(
                hidden=hidden,
                positions=torch.tensor(positions * 2),
                query_start_loc=torch.tensor([0, QUERY, 2 * QUERY], dtype=torch.int32),
                slots=torch.tensor(self.slots),
                num_sampled=torch.ones(2, dtype=torch.int32),
                num_rejected=torch.zeros(2, dtype=torch.int32),
                last_sampled=torch.full((SLOTS, 1), 7),
                next_prefill_tokens=torch.zeros(1, SLOTS, dtype=torch.int32),
                row_bound=2 * QUERY,
                wants_drafts=True,
                **sampling,
            )
        )
        self.end += QUERY
        return self.drafter.finish(Batch(list(self.slots), [QUERY] * 2, None))

    def drain(self) -> None:
        """Until the stream, where there is one, has come to its end."""
        rank0 = self.drafter.rank0
        assert rank0 is not None
        if rank0.handoff is not None:
            assert rank0.handoff.stream.wait_idle(20)
