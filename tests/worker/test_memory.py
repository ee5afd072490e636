"""What fits and what does not is said from the config alone, against checkpoints that are real but for their bytes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.fakes.tiny_checkpoint import write_gemma4, write_speculators, write_target, write_tiny
from tests.fakes.tiny_deepseek import write_tiny_deepseek

from farspark.errors import CheckpointError, ConfigError
from farspark.worker.checkpoint import load_checkpoint, read_config
from farspark.worker.checkpoint.family import COMMON
from farspark.worker.checkpoint.files import TensorFiles
from farspark.worker.checkpoint.load import ITEM_BYTES
from farspark.worker.drafter import open_drafter
from farspark.worker.memory import free_bytes, free_of_gpu, host_free_bytes
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.families import DEFAULT_OPTIONS, build_model, footprint_of

CPU = torch.device("cpu")
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": write_tiny,
    "gated": lambda folder: write_tiny(folder, markov_head_type="gated"),
    "rnn": lambda folder: write_tiny(folder, markov_head_type="rnn"),
    "gemma4": write_gemma4,
    "speculators": write_speculators,
    "v4": lambda folder: write_tiny_deepseek(folder, "v4"),
    "v41": lambda folder: write_tiny_deepseek(folder, "v41"),
}


def nothing_may_be_read(what: str, done: int, total: int) -> None:
    raise AssertionError(f"{what}: {done} of {total}")


def machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def write_hollow(file: Path, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """One tensor, of which the header stands there and nothing else was ever written."""
    size = math.prod(shape) * ITEM_BYTES[dtype]
    header = json.dumps({name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]}}).encode()
    with open(file, "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + size)


def swell(folder: Path) -> int:
    """Give the drafter in `folder` an embedding and a head of two thirds of this machine's memory each; bf16 bytes of both."""
    with TensorFiles(folder) as files:
        names = files.names()
    values = json.loads((folder / "config.json").read_text())
    text = values.get("transformer_layer_config") or values.get("text_config") or values
    text["vocab_size"] = machine_bytes() // 3 // text["hidden_size"]
    if "draft_vocab_size" in values:
        values["draft_vocab_size"] = text["vocab_size"]
    (folder / "config.json").write_text(json.dumps(values))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = read_config(folder, names)
    stored = config.stored_dtypes()
    where = {name: f"{index}.safetensors" for index, name in enumerate(config.tensor_shapes())}
    for name, shape in config.tensor_shapes().items():
        dtype = min(stored.get(name, {COMMON}))
        dtype = "BF16" if dtype == COMMON else dtype
        write_hollow(folder / where[name], name, shape, dtype)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return 2 * 2 * int(text["vocab_size"]) * int(text["hidden_size"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_cannot_fit_says_so_before_a_byte_is_read(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path / "drafter")
    vocabulary_bytes = swell(folder)
    with pytest.raises(ConfigError) as caught:
        open_drafter(folder, progress=nothing_may_be_read)
    message = str(caught.value)
    assert message.startswith(f"the drafter in {folder}, its weights of ")
    weights = int(message.split("weights of ")[1].split()[0].replace(",", ""))
    assert weights > vocabulary_bytes
    assert f"takes {weights + (256 << 20):,} bytes on cpu, and " in message
    assert message.endswith(" bytes are free; free some there, or take a device with more")


def test_a_context_that_cannot_fit_beside_the_weights_says_so_before_a_byte_is_read(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "drafter", max_position_embeddings=1 << 20)
    with pytest.raises(ConfigError) as caught:
        open_drafter(folder, slots=1 << 12, context=1 << 20, progress=nothing_may_be_read)
    message = str(caught.value)
    assert "with a context of 1048576 positions for 4096 slots takes " in message
    assert message.endswith("lower the context or the slots (--context, --slots)")


def test_a_file_that_this_machine_cannot_map_is_one_sentence(tmp_path: Path) -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this machine maps everything")
    folder = write_tiny(tmp_path / "drafter")
    write_hollow(folder / "model.safetensors", "embed_tokens.weight", (2 * machine_bytes(),), "BF16")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as safetensors: .*memory"):
        load_checkpoint(folder)


def test_more_drafts_than_a_block_has_are_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="6 drafts wanted; this checkpoint drafts blocks of 1 to 5"):
        open_drafter(write_tiny(tmp_path / "drafter"), num_drafts=6, progress=nothing_may_be_read)


@pytest.mark.parametrize("carrier", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "reduced"])
def test_what_a_config_says_of_the_weights_is_what_its_model_holds(
    family: str, carrier: torch.dtype, tmp_path: Path
) -> None:
    reduced: dict[str, Callable[[Path], Path]] = {"reduced": lambda folder: write_tiny(folder, draft_vocab_size=32)}
    folder = (FAMILIES | reduced)[family](tmp_path / "drafter")
    target = write_target(tmp_path / "target") if family == "speculators" else None
    arithmetic = Arithmetic(torch.bfloat16, carrier)
    loaded = load_checkpoint(
        folder, target, place=lambda name, tensor, as_stored: tensor.clone() if as_stored else tensor.to(carrier)
    )
    config = loaded.config
    held = footprint_of(config, arithmetic, CPU).held
    model = build_model(loaded, arithmetic, DEFAULT_OPTIONS)
    assert model.weight_bytes <= held <= 1.01 * model.weight_bytes


def test_GB10_MEM_a_gpu_that_does_not_answer_is_asked_through_the_host() -> None:
    """Without a GPU the driver's query raises, as it does on machines whose GPU shares the host's memory."""
    if torch.cuda.is_available():
        pytest.skip("the query answers here")
    answer, host = free_bytes(torch.device("cuda", 0)), host_free_bytes()
    assert answer is not None
    assert host is not None
    assert answer == pytest.approx(host, rel=0.2)


@pytest.mark.parametrize(
    ("free", "total", "host", "is_shared", "expected"),
    [
        (5, 100, 70, False, 5),
        (5, 100, 70, True, 70),  # the cache of files gives way
        (80, 100, 70, True, 80),
        (0, 0, 70, True, 70),
        (5, 100, None, True, 5),
        (0, 0, None, True, None),
    ],
)
def test_GB10_MEM_what_a_gpu_shares_with_the_host_is_what_the_host_has_left(
    free: int, total: int, host: int | None, is_shared: bool, expected: int | None
) -> None:
    assert free_of_gpu(free, total, host, is_shared=is_shared) == expected


def test_GB10_MEM_available_memory_is_read_from_the_kernels_words(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    nowhere = str(tmp_path / "nothing")
    meminfo.write_text("MemTotal:       100 kB\nMemFree:  1 kB\nMemAvailable:     77 kB\n")
    assert host_free_bytes(str(meminfo), nowhere) == 77 * 1024
    for text in ("MemTotal: 100 kB\n", "MemAvailable:\n", "MemAvailable: lots\n"):
        meminfo.write_text(text)
        assert host_free_bytes(str(meminfo), nowhere) is None
    assert host_free_bytes(nowhere, nowhere) is None


def limit(group: Path, maximum: str, current: int, files: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 1\nshmem 0\n")


@pytest.mark.parametrize("where", ["", "machine.slice", "machine.slice/worker.service"])
def test_a_containers_own_limit_counts_and_the_cache_of_files_gives_way(where: str, tmp_path: Path) -> None:
    """A service's limit, a slice's around it, or that of a container whose own group is the root that it sees."""
    meminfo, membership, groups = tmp_path / "meminfo", tmp_path / "membership", tmp_path / "groups"
    meminfo.write_text("MemAvailable: 900 kB\n")
    membership.write_text("1:name=systemd:/elsewhere\n0::/machine.slice/worker.service\n")
    for group in ("", "machine.slice", "machine.slice/worker.service"):
        limit(groups / group, "max", 10, 3)
    paths = str(meminfo), str(membership), str(groups)
    assert host_free_bytes(*paths) == 900 * 1024
    limit(groups / where, "100000", 70_000, 5_000)
    assert host_free_bytes(*paths) == 100_000 - 70_000 + 5_001
    limit(groups / where, "100000", 170_000, 5_000)
    assert host_free_bytes(*paths) == 0
    limit(groups / where, "9000000", 10, 0)
    assert host_free_bytes(*paths) == 900 * 1024
    (groups / where / "memory.stat").write_text("nonsense\n")
    assert host_free_bytes(*paths) == 900 * 1024
