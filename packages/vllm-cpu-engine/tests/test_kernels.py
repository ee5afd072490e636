"""Every native kernel leaves behind what the interpreted kernel leaves behind, on random inputs.

A scenario builds its inputs from a seed, calls vLLM's own function that launches the kernel, and returns what may have
changed. It runs twice: interpreted, and native with the interpreter forbidden.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

# First: it prepares torch for what the others import.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from triton.runtime.interpreter import GridExecutor
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash

from farspark_vllm_cpu_engine.kernels import NATIVE_KERNELS
from farspark_vllm_cpu_engine.launch import install

LAUNCHER = install(NATIVE_KERNELS)
CPU = torch.device("cpu")
SEEDS = range(5)
UNTOUCHED = -7

# What vLLM returns has no types, hence Any.
Tensors = Any
Scenario = Callable[[np.random.Generator], Tensors]


def check(scenario: Scenario, seed: int, monkeypatch: pytest.MonkeyPatch, *, falls_back: bool = False) -> Tensors:
    with LAUNCHER.interpreted():
        expected = scenario(np.random.default_rng(seed))

    interpret = GridExecutor.__call__
    num_interpreted = 0

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_interpreted
        num_interpreted += 1
        return interpret(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    found = scenario(np.random.default_rng(seed))
    assert (num_interpreted > 0) == falls_back
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"tensor {index} differs:\n{one}\n{other}"
    return found


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(np.array(values[0] if len(values) == 1 else values), dtype=dtype)


def untouched(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype)


def random_tokens(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 1000, shape)).to(dtype)


def starts_of(lengths: Any) -> torch.Tensor:
    return ints(np.concatenate([[0], np.cumsum(lengths)]))


# --- the batch ---


@pytest.mark.parametrize("seed", SEEDS)
def test_staged_writes_reach_their_rows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        staged = buffer_utils.StagedWriteTensor((5, 40), torch.int32, CPU)
        staged.gpu.fill_(UNTOUCHED)
        for row in rng.permutation(5)[:3]:
            start, count = int(rng.integers(0, 20)), int(rng.integers(1, 20))
            staged.stage_write(int(row), start, rng.integers(0, 99, count).tolist())
        staged.apply_write()
        return [staged.gpu]

    check(scenario, seed, monkeypatch)


def test_staged_elements_reach_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        staged = buffer_utils.StagedWriteTensor(6, torch.float32, CPU)
        for row in (4, 1):
            staged.stage_write_elem(row, float(rng.random()))
        staged.apply_write()
        return [staged.gpu]

    check(scenario, 0, monkeypatch)


def block_tables(rng: np.random.Generator, num_requests: int) -> block_table.BlockTables:
    """Two groups with block sizes 16 and 32, blocks 0..63, staged writes applied."""
    tables = block_table.BlockTables(
        block_sizes=[16, 32],
        max_num_reqs=num_requests,
        max_num_batched_tokens=64,
        max_num_blocks_per_group=[12, 9],
        device=CPU,
    )
    for request in range(num_requests):
        counts = int(rng.integers(1, 12)), int(rng.integers(1, 9))
        blocks = tuple(rng.integers(0, 64, count).tolist() for count in counts)
        tables.append_block_ids(request, blocks, overwrite=True)
    tables.apply_staged_writes()
    return tables


@pytest.mark.parametrize("seed", SEEDS)
def test_block_tables_are_gathered_with_padding_rows_zeroed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        tables = block_tables(rng, 6)
        for table in tables.input_block_tables:
            table.fill_(UNTOUCHED)
        requests = ints(rng.permutation(6)[:3], dtype=torch.int64)
        tables.gather_block_tables(requests, num_reqs_padded=5)
        return [table.gpu for table in tables.block_tables] + list(tables.input_block_tables)

    check(scenario, seed, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_follow_the_block_tables(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        tables = block_tables(rng, 4)
        tables.slot_mapping_enabled[1] = bool(seed % 2)
        tables.slot_mappings.fill_(UNTOUCHED)
        # A row of -1 is a dummy request without blocks.
        requests = ints([2, -1, 0], dtype=torch.int64)
        starts = starts_of([5, 2, 9])
        positions = torch.from_numpy(np.concatenate([np.arange(3, 8), [0, 1], np.arange(40, 49)]))
        tables.compute_slot_mappings(requests, starts, positions, num_tokens_padded=20)
        return [tables.slot_mappings]

    check(scenario, seed, monkeypatch)


@pytest.mark.parametrize("num_lookahead", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_prompt_chunks_become_input_ids(seed: int, num_lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        input_ids, lookahead = untouched(40), untouched(num_lookahead, 6)
        # Before the end of the prompt, up to its end, past it.
        input_batch.prepare_prefill_inputs(
            input_ids,
            lookahead,
            ints([4, 0, 3], dtype=torch.int64),
            starts_of([7, 5, 1]),
            random_tokens(rng, 6, 50),
            ints([12, 9, 9, 30, 20, 9]),
            ints([7, 9, 9, 30, 3, 9]),
        )
        return [input_ids, lookahead]

    check(scenario, seed, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_positions_and_lengths(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        positions, seq_lens = untouched(32, dtype=torch.int64), untouched(8)
        input_batch.prepare_pos_seq_lens(
            ints(rng.permutation(8)[:3], dtype=torch.int64),
            starts_of(rng.integers(1, 9, 3)),
            ints(rng.integers(0, 50, 8)),
            positions,
            seq_lens,
        )
        return [positions, seq_lens]

    check(scenario, seed, monkeypatch)


@pytest.mark.parametrize("num_new", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_and_draft_tokens_become_input_ids(seed: int, num_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        input_ids = untouched(40)
        num_logits = [4, 1 if num_new else 2, 3, 2]
        logits_indices = input_batch.combine_sampled_and_draft_tokens(
            input_ids,
            ints([5, 1, 2, 0], dtype=torch.int64),
            random_tokens(rng, 6, 1, dtype=torch.int64),
            starts_of([4, 6, 3, 2]),
            # Decoding with drafts, inside the prompt, the row that ends the prompt, decoding.
            ints([24, 9, 11, 30]),
            ints([30 - 2, 10, 10, 9, 9, 20]),
            random_tokens(rng, 6, 4, dtype=torch.int64),
            starts_of(num_logits),
            sum(num_logits),
            num_new,
        )
        return [input_ids, logits_indices]

    check(scenario, seed, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_of_sampled_and_rejected(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        return input_batch.get_num_sampled_and_rejected(
            ints(rng.integers(1, 5, 4)),
            ints(rng.integers(5, 15, 4)),
            starts_of([4, 6, 5, 4]),
            ints(rng.permutation(6)[:4], dtype=torch.int64),
            ints([10] * 6),
        )

    check(scenario, seed, monkeypatch)


@pytest.mark.parametrize("counts_tokens", [False, True])
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_is_booked(seed: int, has_starts: bool, counts_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        computed, last = ints(rng.integers(10, 20, 6)), untouched(6, 1, dtype=torch.int64)
        counts = torch.zeros(6, 1000, dtype=torch.int32) if counts_tokens else None
        tokens, total = untouched(6, 64), ints(rng.integers(10, 20, 6))
        sampled = torch.from_numpy(rng.integers(0, 3, (4, 5)))  # few values, so that some repeat
        input_batch.post_update(
            ints([4, -1, 0, 2], dtype=torch.int64),
            computed,
            last,
            counts,
            sampled,
            ints([5, 2, 0, int(rng.integers(1, 6))]),
            ints([0, 1, 2, 3]),
            starts_of([5, 3, 7, 8]) if has_starts else None,
            tokens,
            total,
        )
        return [computed, last, tokens, total] + ([] if counts is None else [counts])

    check(scenario, seed, monkeypatch)


def test_computed_tokens_advance_by_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        computed = ints(rng.integers(0, 20, 6))
        input_batch.post_update_num_computed_tokens(ints([3, 0], dtype=torch.int64), computed, starts_of([4, 9]))
        return [computed]

    check(scenario, 0, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_logits_know_their_request(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        lengths = rng.integers(1, 7, 4)
        requests = ints(rng.permutation(9)[:4], dtype=torch.int64)
        return input_batch.expand_idx_mapping(requests, int(lengths.sum()), starts_of(lengths), 6)

    check(scenario, seed, monkeypatch)


# --- sampling ---


def random_logits(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy((3 * rng.standard_normal(shape)).astype(np.float32)).to(dtype)


def random_seeds(rng: np.random.Generator, count: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, count))


def mixed_temperatures(rng: np.random.Generator, count: int) -> torch.Tensor:
    """Greedy, 1, and others."""
    return torch.from_numpy(rng.choice(np.array([0.0, 1.0, 0.3, 0.8, 1.7], dtype=np.float32), count))


@pytest.mark.parametrize("seed", SEEDS)
def test_temperature_divides_the_rows_that_have_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        logits = random_logits(rng, 5, 700)
        requests = ints(rng.integers(0, 8, 5), dtype=torch.int64)
        gumbel.apply_temperature(logits, requests, mixed_temperatures(rng, 8))
        return [logits]

    check(scenario, seed, monkeypatch)


@pytest.mark.parametrize("vocab_size", [500, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_token_is_sampled(
    seed: int, is_drafting: bool, dtype: torch.dtype, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        requests = ints([0, 3, 3, -1, 5, 2, 1], dtype=torch.int64)
        return [
            gumbel.gumbel_sample(
                random_logits(rng, 7, vocab_size, dtype=dtype),
                requests,
                mixed_temperatures(rng, 6),
                random_seeds(rng, 6),
                torch.from_numpy(rng.integers(0, 100_000, 7)),
                apply_temperature=is_drafting,
                is_drafting=is_drafting,
            )
        ]

    check(scenario, seed, monkeypatch)


def test_the_same_token_is_sampled_from_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        logits = random_logits(rng, 3, 49_152)
        logits[:, 1000:2000] = -torch.inf
        temperature = torch.tensor([0.0, 0.7, 1.0])
        requests, positions = torch.arange(3), torch.tensor([5, 6, 7])
        return [gumbel.gumbel_sample(logits, requests, temperature, random_seeds(rng, 3), positions, False, False)]

    check(scenario, 0, monkeypatch)


@pytest.mark.parametrize("per_token", [False, True])
def test_drafted_logits_are_kept_before_temperature(per_token: bool) -> None:
    """Triton's interpreter refuses this form of the kernel, so what it must do is written out here."""
    rng = np.random.default_rng(0)
    logits = random_logits(rng, 4, 512, dtype=torch.bfloat16)
    requests, columns = [4, -1, 0, 2], [2, 1, 0, 2] if per_token else [1] * 4
    arguments = (
        logits,
        torch.tensor(requests),
        mixed_temperatures(rng, 6),
        random_seeds(rng, 6),
        torch.from_numpy(rng.integers(0, 1000, 4)),
    )
    cache, expected = (untouched(6, 3, 600).to(torch.bfloat16) for _ in range(2))
    tokens = gumbel.gumbel_sample(
        *arguments,
        apply_temperature=True,
        is_drafting=True,
        logits_cache=cache,
        logits_cache_col=ints(columns) if per_token else torch.tensor(1, dtype=torch.int32),
    )
    for row, (request, column) in enumerate(zip(requests, columns, strict=True)):
        if request >= 0:
            expected[request, column, :512] = logits[row]
    assert torch.equal(cache, expected)
    assert torch.equal(tokens, gumbel.gumbel_sample(*arguments, apply_temperature=True, is_drafting=True))


@pytest.mark.parametrize("case", ["nan", "fp64"])
def test_what_native_sampling_does_not_cover_is_interpreted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        logits = random_logits(rng, 2, 512)
        if case == "nan":
            logits[1, 7] = torch.nan
        temperature = torch.tensor([0.0, 0.7])
        positions = torch.tensor([5, 6])
        return [
            gumbel.gumbel_sample(
                logits,
                torch.arange(2),
                temperature,
                random_seeds(rng, 2),
                positions,
                False,
                False,
                use_fp64=case == "fp64",
            )
        ]

    check(scenario, 0, monkeypatch, falls_back=True)


# --- drafting ---


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_block_drafts_are_prepared(seed: int, sample_from_anchor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    max_reqs, max_tokens, max_model_len, num_drafts = 6, 96, 120, 4
    num_queries = num_drafts + (0 if sample_from_anchor else 1)

    def scenario(rng: np.random.Generator) -> Tensors:
        buffers = input_batch.InputBuffers(max_reqs, max_tokens, CPU)
        for tensor in (buffers.input_ids, buffers.positions, buffers.query_start_loc, buffers.seq_lens):
            tensor.fill_(UNTOUCHED)
        query_slots, context_positions, context_slots = (untouched(max_tokens, dtype=torch.int64) for _ in range(3))
        sample_indices, sample_pos, sample_requests = (
            untouched(max_reqs * num_drafts, dtype=torch.int64) for _ in range(3)
        )
        temperature, seeds = untouched(max_reqs, dtype=torch.float32), untouched(max_reqs, dtype=torch.int64)
        # A prompt chunk, a verification with rejected rows, one decode row close to the longest allowed position.
        lengths, firsts = [30, 5, 1], [10, 33, max_model_len - 3]
        positions = np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, lengths, strict=True)])
        dflash.prepare_dflash_inputs(
            buffers,
            query_slots,
            context_positions,
            context_slots,
            sample_indices,
            sample_pos,
            sample_requests,
            temperature,
            seeds,
            SimpleNamespace(
                num_reqs=3,
                num_scheduled_tokens=np.array(lengths),
                positions=torch.from_numpy(positions),
                query_start_loc=starts_of(lengths),
                idx_mapping=ints(rng.permutation(max_reqs)[:3], dtype=torch.int64),
            ),
            ints([0, int(rng.integers(1, 6)), 1]),
            ints([0, int(rng.integers(0, 5)), 0]),
            random_tokens(rng, max_reqs, 1, dtype=torch.int64),
            random_tokens(rng, max_reqs),
            mixed_temperatures(rng, max_reqs),
            random_seeds(rng, max_reqs),
            # Block 0 is nobody's, so some rows get no slot.
            ints(rng.integers(0, 9, (max_reqs, 8))),
            16,
            0,
            1,
            1,
            999,
            num_queries,
            num_drafts,
            max_reqs,
            max_tokens,
            max_model_len,
            sample_from_anchor,
        )
        outputs = [buffers.input_ids, buffers.positions, buffers.query_start_loc, buffers.seq_lens, query_slots]
        samples = [sample_indices, sample_pos, sample_requests]
        return [*outputs, context_positions, context_slots, *samples, temperature, seeds]

    check(scenario, seed, monkeypatch)


# --- verification ---


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_are_gathered_for_verification(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        return rejection_sampler.gather_draft_sampled(
            random_tokens(rng, 20),
            torch.from_numpy(rng.integers(0, 40, 20)),
            torch.from_numpy(rng.integers(0, 20, 9)),
            torch.from_numpy(rng.integers(0, 5, 9)),
            ints(rng.integers(0, 4, 9)),
            ints(rng.integers(0, 40, 5)),
        )

    check(scenario, seed, monkeypatch)


def test_sampled_tokens_are_laid_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(rng: np.random.Generator) -> Tensors:
        flat = untouched(12, dtype=torch.int64)
        sampled = random_tokens(rng, 3, 5, dtype=torch.int64)
        counts, starts = ints([2, 5, 1]), starts_of([4, 5, 3])
        rejection_sampler._flatten_sampled_kernel[(3,)](flat, sampled, sampled.stride(0), counts, starts, num_warps=1)
        return [flat]

    check(scenario, 0, monkeypatch)


NUM_DRAFTS = 4


def verify(
    rng: np.random.Generator, temperatures: torch.Tensor, *, vocab_size: int = 700, has_draft_logits: bool = False
) -> Tensors:
    """Three requests with 4, 2 and 0 drafts, good and bad ones and a placeholder; returns tokens up to the count."""
    num_drafts = [NUM_DRAFTS, 2, 0]
    starts = starts_of([count + 1 for count in num_drafts])
    num_logits = int(starts[-1])
    requests = torch.tensor([4, 0, 2])
    expanded, local_pos = input_batch.expand_idx_mapping(requests, num_logits, starts, NUM_DRAFTS + 1)
    logits = random_logits(rng, num_logits, vocab_size)
    drafts = logits.argmax(dim=1).roll(1).to(torch.int32)  # row i + 1 holds the draft that row i verifies
    if not has_draft_logits:
        # A target that is sure of its choice, so that sampled drafts are accepted too.
        logits *= 3
        spoilt = rng.random(num_logits) < 0.25
        drafts[spoilt] = random_tokens(rng, num_logits)[spoilt] % vocab_size
        drafts[rng.random(num_logits) < 0.05] = -1
    draft_logits = random_logits(rng, 6, NUM_DRAFTS, vocab_size) if has_draft_logits else None
    sampled, num_sampled = rejection_sampler_utils.rejection_sample(
        logits,
        draft_logits,
        drafts,
        starts,
        torch.from_numpy(rng.integers(0, 5000, num_logits)),
        requests,
        expanded,
        local_pos,
        temperatures,
        random_seeds(rng, 6),
        NUM_DRAFTS,
    )
    tokens = [sampled[row, : int(count)].clone() for row, count in enumerate(num_sampled)]
    return [num_sampled, *tokens]


@pytest.mark.parametrize("seed", range(12))
def test_greedy_drafts_are_verified(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda rng: verify(rng, torch.zeros(6)), seed, monkeypatch)


@pytest.mark.parametrize("seed", range(12))
def test_sampled_drafts_are_verified(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda rng: verify(rng, mixed_temperatures(rng, 6)), seed, monkeypatch)


def test_drafts_are_verified_over_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda rng: verify(rng, torch.tensor([0.8, 1, 0, 1, 1, 1]), vocab_size=20_000), 0, monkeypatch)


def test_the_scenarios_of_verification_accept_and_reject() -> None:
    counts = [int(n) for seed in range(12) for n in verify(np.random.default_rng(seed), torch.zeros(6))[0][:2]]
    assert {1, 2, 3, NUM_DRAFTS + 1} <= set(counts)


def test_sampled_drafts_with_their_distribution_keep_the_targets() -> None:
    """Interpreted, this path does not run at all, so it is held against what it is for: one draft over five tokens,
    verified many times under independent seeds, must give tokens in the target's distribution."""
    trials, vocab_size = 4000, 5
    rng = np.random.default_rng(0)
    target, draft = random_logits(rng, 1, vocab_size) / 3, random_logits(rng, 1, 1, vocab_size) / 3
    draft_probabilities = torch.softmax(draft[0, 0], dim=0).numpy().astype(np.float64)
    drafts = np.zeros(2 * trials, dtype=np.int32)
    drafts[1::2] = rng.choice(vocab_size, trials, p=draft_probabilities / draft_probabilities.sum())
    sampled, _ = rejection_sampler_utils.rejection_sample(
        target.expand(2 * trials, vocab_size).contiguous(),
        draft.expand(trials, 1, vocab_size).contiguous(),
        torch.from_numpy(drafts),
        torch.arange(0, 2 * trials + 1, 2, dtype=torch.int32),
        torch.from_numpy(rng.integers(0, 5000, 2 * trials)),
        torch.arange(trials),
        torch.arange(trials).repeat_interleave(2),
        torch.arange(2, dtype=torch.int32).repeat(trials),
        torch.ones(trials),
        random_seeds(rng, trials),
        1,
    )
    shares = np.bincount(sampled[:, 0].numpy(), minlength=vocab_size) / trials
    expected = torch.softmax(target[0], dim=0).numpy()
    # Four standard deviations of a share.
    assert np.all(np.abs(shares - expected) < 4 * np.sqrt(expected * (1 - expected) / trials))
