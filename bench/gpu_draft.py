"""The time of a draft on a GPU at published shapes, with random weights, against the time that its bytes take.

For each drafter and number of requests: `floor` is the bytes that a draft reads once, over the bandwidth that the same run
measures; `draft` is the device's own time of one replay; `parts` are the replays of its parts alone; `whole` is what a STEP
costs the worker, from rows in host memory to drafts in host memory, and `waits` how often the host waits for the device in it:
once, for the drafts. `plain` is the same draft without fused kernels and
without graphs. The floor of routed experts is that of packed ones, also where `--experts decoded` holds them in bf16. Run on
a GPU machine from the root of the repository: `python3 bench/gpu_draft.py [--only NAME] [--json FILE]`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from farspark.worker.batch import DraftBatch, DraftEntry  # noqa: E402
from farspark.worker.checkpoint import DrafterConfig, LoadedCheckpoint  # noqa: E402
from farspark.worker.checkpoint import gemma4 as gemma4_family  # noqa: E402
from farspark.worker.checkpoint import qwen3 as qwen3_family  # noqa: E402
from farspark.worker.checkpoint.deepseek import V4, V41, DeepseekV4Config  # noqa: E402
from farspark.worker.checkpoint.keys import ConfigKeys  # noqa: E402
from farspark.worker.device import DeviceWork, open_device, work_on  # noqa: E402
from farspark.worker.drafter import DSparkDrafter, assemble, fitting  # noqa: E402
from farspark.worker.graphs import DirectCalls  # noqa: E402
from farspark.worker.models.base import Arithmetic  # noqa: E402
from farspark.worker.models.experts import Routing  # noqa: E402
from farspark.worker.models.packed_experts import PackedExperts  # noqa: E402

CONTEXT = 4096
SLOTS = 8
ROWS_EACH = 6  # of a step: a verified anchor and up to five accepted drafts


def qwen3(hidden: int, intermediate: int, heads: int, taps: list[int], target_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 5,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "layer_types": ["full_attention"] * 5,
        "block_size": 7,
        "mask_token_id": 151669,
        "target_layer_ids": taps,
        "num_target_layers": target_layers,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
    }


QWEN3 = {
    "qwen3-4b": qwen3(2560, 9728, 32, [1, 9, 17, 25, 33], 36),
    "qwen3-8b": qwen3(4096, 12288, 32, [1, 9, 17, 25, 33], 36),
    "qwen3-14b": qwen3(5120, 17408, 40, [1, 10, 19, 28, 37], 40),
}

# No sizes of Gemma 4 12B were at hand: these are Gemma 3 12B's, with one key-value head of 512 in the global layers.
GEMMA4: dict[str, Any] = {
    **QWEN3["qwen3-4b"],
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "vocab_size": 262144,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "mask_token_id": 4,
    "target_layer_ids": [5, 17, 29, 41, 46],
    "num_target_layers": 48,
}


def deepseek(kind: str, **sizes: Any) -> DeepseekV4Config:
    common: dict[str, Any] = {
        "stages": 3,
        "head_dim": 512,
        "rope_head_dim": 64,
        "o_lora_rank": 1024,
        "swiglu_limit": 10.0,
        "rope_theta": 10000.0,
        "window": 128,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "vocab_size": 129280,
        "max_position": 1 << 20,
        "block_size": 5,
        "mask_token_id": 128799,
    }
    return DeepseekV4Config(kind=kind, **(common | sizes))


def configs() -> dict[str, DrafterConfig]:
    """The published shapes."""
    return {name: qwen3_family.parse(ConfigKeys(values), frozenset()) for name, values in QWEN3.items()} | {
        "gemma4-12b": gemma4_family.parse(ConfigKeys(GEMMA4), frozenset()),
        "v4.1-flash": deepseek(
            V41,
            hidden_size=5120,
            moe_intermediate_size=2304,
            num_heads=64,
            q_lora_rank=1280,
            o_groups=8,
            experts=128,
            experts_per_token=3,
            routed_scaling_factor=1.5,
            rms_norm_eps=1e-20,
            fp8_block=32,
            target_layer_ids=(37, 38, 39),
            markov_rank=256,
        ),
        "v4-flash": deepseek(
            V4,
            hidden_size=4096,
            moe_intermediate_size=2048,
            num_heads=64,
            q_lora_rank=1024,
            o_groups=8,
            experts=256,
            experts_per_token=6,
            routed_scaling_factor=1.5,
            rms_norm_eps=1e-6,
            fp8_block=128,
            target_layer_ids=(40, 41, 42),
            markov_rank=256,
        ),
    }


def random_checkpoint(config: DrafterConfig, device: torch.device) -> LoadedCheckpoint:
    torch.manual_seed(1)
    stored = config.stored_dtypes()
    tensors = {
        name: random_tensor(name, shape, stored.get(name, frozenset()), device)
        for name, shape in config.tensor_shapes().items()
    }
    return LoadedCheckpoint(config, tensors, bytes(32), bytes(32), config.vocab_size)


def random_tensor(name: str, shape: tuple[int, ...], stored: frozenset[str], device: torch.device) -> torch.Tensor:
    """Of the dtype that a checkpoint has, and of a size that keeps activations finite."""

    def codes(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device)

    if "F8_E4M3" in stored:
        # Of both signs: weights of one would turn all tokens into nearly the same, and send them to the same experts.
        return (codes(0, 0x68) | codes(0, 2) << 7).view(torch.float8_e4m3fn)
    if "F8_E8M0" in stored:
        return codes(115, 117).view(torch.float8_e8m0fnu)
    if "I8" in stored:
        return codes(0, 255).view(torch.int8)
    one = torch.ones(shape, dtype=torch.bfloat16, device=device)
    if not name.endswith(("norm.weight", "layer_scalar")):
        one.normal_(std=0.5 if "embed" in name or "markov" in name else shape[-1] ** -0.5)
    is_float32 = name.startswith("confidence_head.") or ".hc_" in name or name.endswith(("attn_sink", "gate.bias"))
    return one.float() if is_float32 else one


def bytes_read(config: DrafterConfig, requests: int, visible: int, experts: float = 0.0) -> int:
    """Of one draft without its append: every weight of the block and the head once, as held; the Markov projection once a
    position; `experts` of a stage, or as many as the requests' tokens are expected to choose; the context of every request."""
    total, per_expert = 0.0, 0
    for name, shape in config.tensor_shapes().items():
        values = int(np.prod(shape))
        if ".experts." in name:
            # Packed fp4 and its scales, a byte each as stored.
            per_expert += values if ".experts.0." in name else 0
        elif "embed" not in name and not name.startswith(("fc.", "hidden_norm")) and "main_" not in name:
            is_projection = name.endswith(("markov_w2.weight", "markov_head.head.weight"))
            is_lookup = name.endswith("markov_w1.weight")
            is_scale = name.endswith(".scale") and "hc_" not in name
            size = 0 if is_lookup or is_scale else values * 2
            total += size * config.max_drafts if is_projection else size
    if isinstance(config, DeepseekV4Config):
        tokens = requests * config.block_size
        expected = config.experts * (1 - (1 - config.experts_per_token / config.experts) ** tokens)
        total += (experts or expected) * per_expert
        return int(total + requests * min(visible, config.window) * config.stages * config.head_dim * 2)
    return int(total + requests * visible * config.context_layers * int(np.prod(config.context_entry)) * 2)


def bandwidth(device: torch.device) -> float:
    """Bytes per second that the device reads: a sum over 8 GiB."""
    data = torch.zeros(1 << 32, dtype=torch.bfloat16, device=device).view(torch.int32)
    best = min(timed(lambda: torch.sum(data, dtype=torch.int64), 5))
    copied = torch.empty_like(data)
    copying = min(timed(lambda: copied.copy_(data), 5))
    return max(data.nbytes / best, 2 * data.nbytes / copying) * 1e6


def timed(work: Callable[[], object], count: int) -> list[float]:
    """Microseconds on the device, each run by itself."""
    found = []
    event: Any = torch.cuda.Event
    for _ in range(count + 2):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000)
    return found[2:]


class Steps:
    """Rounds of `requests` requests that have `visible` positions behind them."""

    def __init__(self, drafter: DSparkDrafter, requests: int, visible: int) -> None:
        self.drafter = drafter
        self.requests = requests
        self.at = visible
        self.rows = np.random.default_rng(0).integers(
            0x3C00, 0x3F80, (requests * ROWS_EACH, drafter.info.row_bytes // 2), dtype=np.uint16
        )

    def batch(self) -> DraftBatch:
        entries = [
            DraftEntry(
                slot=slot,
                reset=False,
                first_pos=self.at,
                n_rows=ROWS_EACH,
                anchor_token=17 + slot,
                visible_from=0,
                need_draft=True,
                n_out=self.drafter.info.num_drafts,
            )
            for slot in range(self.requests)
        ]
        return DraftBatch(entries, self.rows.reshape(-1).data.cast("B"), want_margins=False)

    def wall_us(self, count: int) -> float:
        batch, found = self.batch(), []
        for _ in range(count + 3):
            start = time.perf_counter_ns()
            self.drafter.draft(batch)
            found.append((time.perf_counter_ns() - start) / 1000)
        return statistics.median(found[3:])


def host_numbers(steps: Steps) -> torch.Tensor:
    at = steps.at + ROWS_EACH
    lowest = max(0, at - steps.drafter.info.context)
    numbers = [[slot, at, lowest, 17 + slot] for slot in range(steps.requests)]
    return torch.tensor(numbers, dtype=torch.int64).T.contiguous()


def measure(drafter: DSparkDrafter, requests: int, visible: int) -> dict[str, float]:
    """Microseconds of the whole and of its parts, each as one replay."""
    steps = Steps(drafter, requests, visible)
    found = {"whole_us": steps.wall_us(30), "host_waits": host_waits(drafter, steps.batch())}
    bound = fitting(drafter._shapes.contexts, min(drafter.info.context, visible + ROWS_EACH))
    device, model = drafter._device, drafter._model
    numbers = host_numbers(steps).to(device)
    taps = torch.from_numpy(steps.rows.view(np.int16)).view(torch.bfloat16).to(device)
    count = fitting(drafter._shapes.rows, len(taps))
    taps = torch.cat((taps, taps.new_zeros(count - len(taps), taps.shape[1])))
    where = torch.full((2, count), drafter._store.scratch_row, dtype=torch.int64, device=device)
    forward = functools.partial(drafter._forward, numbers, bound, drafter._shapes.steps[-1], False)
    block = forward()[1]
    slots, anchors, lowest, anchor_tokens = numbers
    inputs = drafter._block_of(slots, anchors, lowest, anchor_tokens, bound)
    parts: dict[str, Callable[[], object]] = {
        "draft_us": forward,
        "append_us": lambda: drafter._write(taps, where),
        "block_us": lambda: model.block(*inputs),
        "head_us": lambda: model.base_logits(block.hidden),
        "chain_us": lambda: chain_of(drafter, block),
    }
    found["experts_read"] = experts_read(parts["block_us"])
    for name, work in parts.items():
        replay = captured(work)
        found[name] = statistics.median(timed(replay, 20))
    return found


def host_waits(drafter: DSparkDrafter, batch: DraftBatch) -> int:
    """How often the host waits for the device in a step whose shapes were met before, from rows in to ids out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            drafter.draft(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def chain_of(drafter: DSparkDrafter, block: Any) -> object:
    """The sequential stage, at once where there is a kernel for the head."""
    model = drafter._model
    answer = model.arithmetic.greedy_answer(
        block.base, block.hidden, block.anchor_tokens, model.markov, model.confidence
    )
    return list(drafter._walk(block)) if answer is None else answer


def judging_us(drafter: DSparkDrafter, requests: int, visible: int) -> tuple[float, float]:
    """Microseconds of a step that keeps its logits, and of judging a chain of each of its requests after it, on the worker."""
    batch = Steps(drafter, requests, visible).batch()._replace(want_margins=True)
    drafting, judging = [], []
    for _ in range(13):
        start = time.perf_counter_ns()
        result = drafter.draft(batch)
        drafted = time.perf_counter_ns()
        assert result.judge is not None
        result.judge(range(requests), result.tokens)
        drafting.append((drafted - start) / 1000)
        judging.append((time.perf_counter_ns() - drafted) / 1000)
    return statistics.median(drafting[3:]), statistics.median(judging[3:])


def profile(drafter: DSparkDrafter, requests: int, visible: int) -> None:
    """Prints which kernels three replays of a draft consist of."""
    numbers = host_numbers(Steps(drafter, requests, visible)).to(drafter._device)
    bound = fitting(drafter._shapes.contexts, min(drafter.info.context, visible + ROWS_EACH))
    replay = captured(functools.partial(drafter._forward, numbers, bound, drafter._shapes.steps[-1], False))
    replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    print(f"three drafts for {requests} requests:")
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=90), flush=True)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def worker_of(config: DrafterConfig, device: torch.device, work: DeviceWork) -> DSparkDrafter:
    drafter = assemble(random_checkpoint(config, device), device, work, SLOTS, CONTEXT)
    if isinstance(config, DeepseekV4Config):
        with_tokens_apart(drafter, config)
    return drafter


def with_tokens_apart(drafter: DSparkDrafter, config: DeepseekV4Config) -> None:
    """Random tokens where a block has masks: with random weights all masks would choose the same experts, and a draft would read
    far fewer of them than a trained one."""
    block_of = drafter._block_of
    others = torch.randint(0, config.vocab_size, (SLOTS, config.block_size), device=drafter._device)

    def apart(*arguments: Any) -> Any:
        tokens, positions, view = block_of(*arguments)
        return others[: len(tokens)], positions, view

    drafter._block_of = apart  # type: ignore[method-assign, assignment]


def experts_read(work: Callable[[], object]) -> float:
    """Different experts that a block chooses, a stage; 0 where there are none that stay packed."""
    found: list[int] = []
    sums = PackedExperts.sums

    def noted(experts: PackedExperts, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        found.append(len(set(routing.experts.flatten().tolist())))
        return sums(experts, x, routing)

    with mock.patch.object(PackedExperts, "sums", noted):
        work()
    return statistics.mean(found) if found else 0.0


def with_decoded_experts(work: DeviceWork) -> DeviceWork:
    arithmetic = work.arithmetic
    kind = type("Decoding", (type(arithmetic),), {"packed_experts": None})
    return work._replace(arithmetic=kind(arithmetic.dtype, arithmetic.carrier))


def report(name: str, device: torch.device, rate: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    lines = []
    config = configs()[name]
    has_experts = isinstance(config, DeepseekV4Config)
    for experts in arguments.experts if has_experts else ("none",):
        work = work_on(device, torch.bfloat16)
        drafter = worker_of(config, device, with_decoded_experts(work) if experts == "decoded" else work)
        torch.cuda.empty_cache()
        began = time.perf_counter()
        drafter.warm_up(lambda what, done, total: None)
        warm_up_s = time.perf_counter() - began
        memory = torch.cuda.memory_allocated(device)
        for visible in (500, 4000) if drafter.info.context == CONTEXT else (500,):
            for requests in (1, 2, 4, 8):
                with torch.inference_mode():
                    found = measure(drafter, requests, visible)
                size = bytes_read(config, requests, visible + ROWS_EACH, found["experts_read"])
                floor = size / rate * 1e6
                parts = found["block_us"] + found["head_us"] + found["chain_us"]
                line = {
                    "drafter": name,
                    "experts": experts,
                    "requests": requests,
                    "visible": visible,
                    "bytes": size,
                    "floor_us": floor,
                    **found,
                    "draft/floor": found["draft_us"] / floor,
                    "draft/parts": found["draft_us"] / parts,
                    "memory_bytes": memory,
                    "warm_up_s": warm_up_s,
                }
                lines.append(line)
                print(
                    f"{name} {requests} requests, {visible} visible: floor {floor:.0f}, draft {found['draft_us']:.0f} "
                    f"({line['draft/floor']:.2f} floors; {line['draft/parts']:.2f} of block {found['block_us']:.0f} + "
                    f"head {found['head_us']:.0f} + chain {found['chain_us']:.0f}), append {found['append_us']:.0f}, whole "
                    f"step {found['whole_us']:.0f} us, {found['experts_read']:.1f} experts a stage",
                    flush=True,
                )
        print(f"{name}: {memory / 2**30:.2f} GiB allocated, warm-up {warm_up_s:.1f} s", flush=True)
        if arguments.profile:
            with torch.inference_mode():
                for requests in (1, 4):
                    profile(drafter, requests, 500)
        if arguments.judge:
            for requests in (1, 4, 8):
                kept, judged = judging_us(drafter, requests, 500)
                print(
                    f"{name} {requests} requests: step {kept:.0f} us with margins, judging {judged:.0f} us", flush=True
                )
        del drafter
        gc.collect()  # one with tokens set apart refers to itself
        torch.cuda.empty_cache()
    if arguments.plain:
        work = DeviceWork(Arithmetic(torch.bfloat16, torch.bfloat16), DirectCalls(device), None)
        plain = worker_of(config, device, work)
        for requests in (1, 4):
            took = Steps(plain, requests, 500).wall_us(10)
            print(f"{name} {requests} requests without kernels and graphs: {took:.0f} us", flush=True)
            for line in lines:
                if line["requests"] == requests and line["visible"] == 500:
                    line["plain_whole_us"] = took
        del plain
        torch.cuda.empty_cache()
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: microseconds, bytes in MB, memory in GiB."""
    rows = [
        "| drafter | experts | visible | requests | MB | floor | draft | draft / floor | draft / its parts | append | step | "
        "waits | plain step | memory |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        plain = f"{line['plain_whole_us']:,.0f}" if "plain_whole_us" in line else ""
        memory = f"{line['memory_bytes'] / 2**30:.2f}"
        rows.append(
            f"| {line['drafter']} | {line['experts']} | {line['visible']} | {line['requests']} | {line['bytes'] / 1e6:,.0f} | "
            f"{line['floor_us']:,.0f} | {line['draft_us']:,.0f} | {line['draft/floor']:.2f} | {line['draft/parts']:.2f} | "
            f"{line['append_us']:,.0f} | {line['whole_us']:,.0f} | {line['host_waits']} | {plain} | {memory} |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", choices=list(configs()), action="append", help="this drafter; may be repeated")
    parser.add_argument(
        "--experts",
        choices=("packed", "decoded"),
        nargs="+",
        default=["packed"],
        help="how routed experts are held: fp4, or bf16, which takes about four times the memory (default: packed)",
    )
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="without the plain draft")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a draft for 1 and 4 requests")
    parser.add_argument(
        "--judge",
        action="store_true",
        help="also print what a step takes that keeps its logits, and judging its chains",
    )
    parser.add_argument("--json", type=Path, help="write the report here too")
    arguments = parser.parse_args()
    device = open_device("cuda")
    rate = bandwidth(device)
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: {rate / 1e12:.2f} TB/s", flush=True)
    lines = []
    for name in arguments.only or configs():
        lines += report(name, device, rate, arguments)
    print(table(lines), flush=True)
    if arguments.json:
        facts = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "host": platform.machine()}
        arguments.json.write_text(
            json.dumps({**facts, "bytes_per_s": rate, "lines": lines}, indent=1), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
