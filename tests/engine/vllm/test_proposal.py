"""What drafts were drawn from, as vLLM's rejection sampler reads it: softmax of a slot's rows over its temperature."""

from __future__ import annotations

import logging

import pytest
import torch

from farspark.engine.shape import ModelShape
from farspark.engine.vllm.proposal import Proposal
from farspark.engine.vllm.remote import RemoteDrafts

SLOTS, N, VOCAB, SUPPORT = 5, 3, 50, 4
CPU = torch.device("cpu")
TEMPERATURES = torch.tensor([0.7, 1.0, 0.0, 2.0, 0.01])


def shape() -> ModelShape:
    return ModelShape(
        num_drafts=N,
        vocab_size=VOCAB,
        hidden_size=1,
        taps=1,
        slots=SLOTS,
        context=1,
        ring=1,
        max_position=8,
        support=SUPPORT,
    )


def drafts(slots: list[int], seed: int, *, sampled: list[bool], ok: list[bool] | None = None) -> RemoteDrafts:
    generator = torch.Generator().manual_seed(seed)
    n = len(slots)
    support = torch.stack(
        [torch.stack([torch.randperm(VOCAB, generator=generator)[:SUPPORT] for _ in range(N)]) for _ in slots]
    ).int()
    q = torch.rand(n, N, SUPPORT, generator=generator)
    q[:, :, -1] = 0  # as a low temperature leaves it
    q /= q.sum(dim=-1, keepdim=True)
    is_ok = torch.tensor(ok or [True] * n)
    return RemoteDrafts(
        tokens=torch.where(is_ok[:, None], support[:, :, 0], 0),
        confidences=torch.zeros(n, N),
        ok=is_ok,
        depths=torch.full((n,), N, dtype=torch.int32),
        sampled=torch.tensor(sampled) & is_ok,
        support=support,
        q=q,
    )


def distribution(proposal: Proposal, slot: int) -> torch.Tensor:
    """[N, VOCAB], as the sampler makes it."""
    return torch.softmax(proposal.logits[slot] / TEMPERATURES[slot], dim=-1)


def expected(one: RemoteDrafts, row: int) -> torch.Tensor:
    assert one.support is not None
    assert one.q is not None
    return torch.zeros(N, VOCAB).scatter(1, one.support[row].long(), one.q[row])


def test_a_drawn_row_is_its_q_at_its_temperature_and_nothing_elsewhere() -> None:
    proposal = Proposal(shape(), CPU, is_shared=False, is_divided=True)
    slots = [4, 1, 3, 0]
    # Twice, so that what stood there before is gone.
    for seed in (1, 2):
        one = drafts(slots, seed, sampled=[True] * 4)
        proposal.put(torch.tensor(slots, dtype=torch.int32), one, TEMPERATURES)
        for row, slot in enumerate(slots):
            assert torch.allclose(distribution(proposal, slot), expected(one, row), atol=1e-6)
            assert int((proposal.logits[slot] > float("-inf")).sum()) == N * (SUPPORT - 1)


def test_the_rows_of_slots_that_are_not_in_the_step_stay() -> None:
    proposal = Proposal(shape(), CPU, is_shared=False, is_divided=True)
    first = drafts([0, 1], 1, sampled=[True, True])
    proposal.put(torch.tensor([0, 1]), first, TEMPERATURES)
    proposal.put(torch.tensor([1]), drafts([1], 2, sampled=[True]), TEMPERATURES)
    assert torch.allclose(distribution(proposal, 0), expected(first, 0), atol=1e-6)


def test_place_holders_and_greedy_drafts_are_certain() -> None:
    proposal = Proposal(shape(), CPU, is_shared=False, is_divided=True)
    proposal.put(torch.tensor([0, 1]), drafts([0, 1], 1, sampled=[True, True]), TEMPERATURES)
    one = drafts([0, 1], 2, sampled=[True, False], ok=[False, True])
    proposal.put(torch.tensor([0, 1]), one, TEMPERATURES)
    for row, slot in enumerate((0, 1)):
        certain = torch.zeros(N, VOCAB).scatter(1, one.tokens[row].long()[:, None], 1.0)
        assert torch.equal(distribution(proposal, slot), certain)


def test_a_local_drafters_rows_stay_where_the_worker_has_none_and_go_where_it_has() -> None:
    proposal = Proposal(shape(), CPU, is_shared=True, is_divided=True)
    local = torch.randn(2, N, VOCAB)
    proposal.logits[:2] = local
    one = drafts([0, 1], 3, sampled=[True, True], ok=[True, False])
    proposal.put(torch.tensor([0, 1]), one, TEMPERATURES)
    assert torch.allclose(distribution(proposal, 0), expected(one, 0), atol=1e-6)
    assert torch.equal(proposal.logits[1], local[1])


def test_its_memory_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        proposal = Proposal(shape(), CPU, is_shared=False, is_divided=True)
    assert proposal.nbytes == SLOTS * N * (4 * VOCAB + 8 * SUPPORT)
    assert "5 slots x 3 drafts x 50 ids x 4 bytes" in caplog.text


def test_where_vllm_keeps_divided_logits_the_temperature_is_not_in_them() -> None:
    proposal = Proposal(shape(), CPU, is_shared=False, is_divided=False)
    one = drafts([0], 1, sampled=[True])
    proposal.put(torch.tensor([0]), one, TEMPERATURES)
    assert torch.allclose(torch.softmax(proposal.logits[0], dim=-1), expected(one, 0), atol=1e-6)
