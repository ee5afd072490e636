"""A launch without Triton's launcher passes what that would pass, and is refused where a kernel is not quite as expected."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.native.launches import parameters_of

from farspark.engine.cuda_driver import DriverError
from farspark.engine.gather.direct import DirectLaunchError, Layout, make_launch
from farspark.engine.gather.forms import random_step
from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.torch_gather import StepTensors
from farspark.native import Launch
from farspark.native.round_calls import open_round_calls

pytest.importorskip("triton")
from farspark.engine.gather import triton_gather as module
from farspark.engine.gather.triton_gather import TritonGather

CPU = torch.device("cpu")
FUNCTION = 0xF00D
TO = 0x7000_0000_0000, 0x7000_1000_0040  # where a prepared launch has rows and metadata
SHAPE = GatherShape(max_requests=4, max_tokens=64, taps=3, hidden_size=32, context=12, ring=5)
SAMPLED = dataclasses.replace(SHAPE, is_sampled=True)


class Driver:
    """Knows how a kernel takes its parameters, and reads them as the device would."""

    def __init__(self) -> None:
        self.parameters: Layout = []
        self.launches: list[tuple[tuple[int, int, int], list[int]]] = []

    def layout(self, function: int) -> Layout:
        assert function == FUNCTION
        return self.parameters

    def launch(self, launch: Launch, stream: int) -> None:
        self.launches.append((launch.grid, parameters_of(launch, [size for _, size in self.parameters])))


class Kernel:
    """In place of the compiled kernel: keeps what Triton's launcher was given."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.calls: list[tuple[tuple[int, ...], list[Any]]] = []
        self.names = [name for name in module._pack_kernel.arg_names if not name.isupper()]
        self.metadata = SimpleNamespace(
            num_warps=4,
            num_ctas=1,
            shared=48,
            launch_cooperative_grid=False,
            launch_pdl=False,
            global_scratch_size=0,
            profile_scratch_size=0,
        )
        self.function = FUNCTION
        self.src = SimpleNamespace(signature={})

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Kernel:
            assert len(arguments) == len(self.names)
            self.calls.append((grid, list(arguments)))
            types = {
                name: "i32" if isinstance(value, int) else f"*{value.dtype}"
                for name, value in zip(self.names, arguments, strict=True)
            }
            self.src.signature = types | dict.fromkeys(constants, "constexpr")
            if not self.driver.parameters:
                self.driver.parameters = layout_of([*types.values(), "*", "*"])
            return self

        return launch


def layout_of(types: list[str]) -> Layout:
    """By the C compiler's rules, which are the driver's."""
    fields = [(str(i), ctypes.c_int32 if kind == "i32" else ctypes.c_uint64) for i, kind in enumerate(types)]
    structure = type("Parameters", (ctypes.Structure,), {"_fields_": fields})
    return [(getattr(structure, name).offset, ctypes.sizeof(kind)) for name, kind in fields]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(Driver())
    monkeypatch.setattr(module, "_pack_kernel", kernel)
    return kernel


def values(arguments: list[Any]) -> list[int]:
    return [one.data_ptr() if isinstance(one, torch.Tensor) else int(one) for one in arguments]


@pytest.mark.parametrize("shape", [SHAPE, SAMPLED])
def test_the_driver_is_given_what_tritons_launcher_would_pass(shape: GatherShape, kernel: Kernel) -> None:
    by_triton, direct = TritonGather(shape, CPU), TritonGather(shape, CPU, driver=kernel.driver)
    direct._places, direct._meta = by_triton._places, by_triton._meta  # else their buffers differ
    for seed in range(40):
        step = random_step(shape, CPU, seed, torch.bfloat16 if seed % 3 else torch.float32)
        step = step._replace(hidden=[one[: step.positions.shape[0]].clone() for one in step.hidden])
        for keep in (True, False):
            kernel.calls.clear()
            by_triton._enqueue(step, keep=keep)
            (grid, arguments), before = kernel.calls.pop(), len(kernel.driver.launches)
            direct._enqueue(step, keep=keep)
            if seed < 2:
                continue  # each kind is compiled by Triton first
            assert not kernel.calls
            assert kernel.driver.launches[before:] == [((*grid, 1), [*values(arguments), 0, 0])]
    assert direct.how_launched == "by the driver"


def test_a_prepared_launch_is_the_one_that_pack_makes(kernel: Kernel) -> None:
    gather = TritonGather(SHAPE, CPU, driver=kernel.driver)
    step = random_step(SHAPE, CPU, 5, torch.bfloat16)
    assert gather.prepare(step, *TO) == 0  # nothing is compiled yet
    gather.pack(step)
    gather.pack(step)
    address = gather.prepare(step, *TO)
    (launch,) = (one for one in gather._launches.values() if one is not None)
    assert address == launch.address
    sizes = [size for _, size in kernel.driver.parameters]
    grid, expected = kernel.driver.launches[-1]
    expected = expected.copy()
    staging, meta = (kernel.names.index(name) for name in ("staging", "meta"))
    assert (expected[staging], expected[meta]) == (gather.rows_address, gather.meta_address)
    expected[staging], expected[meta] = TO  # only where it writes to is another place
    assert (launch.grid, parameters_of(launch, sizes)) == (grid, expected)
    assert gather.prepare(step, TO[0] + 2, TO[1]) == 0  # Triton would compile another kernel for it
    with pytest.raises(ValueError, match="rows in a step"):
        gather.prepare(step._replace(row_bound=SHAPE.max_rows + 1), *TO)


def changed(chance: random.Random, step: StepTensors) -> StepTensors:
    """The same with one thing otherwise: another kind of step, or one that is none."""
    at = chance.randrange(len(step.hidden))
    tap, rows = step.hidden[at], len(step.hidden[at])
    spread = torch.zeros(rows, 40, dtype=tap.dtype)
    taps = [
        tap[:, :24],  # a part of every row
        tap.view(2, rows, 16)[0],
        spread[:, 8:],
        spread[:, 1:33],
        tap.t().contiguous().t(),
        tap.float(),
        tap[0],
        torch.zeros(0, 32, dtype=tap.dtype),
    ]
    changes: list[dict[str, Any]] = [
        {"hidden": [*step.hidden[:at], chance.choice(taps), *step.hidden[at + 1 :]]},
        {"hidden": step.hidden[:at]},
        {"hidden": [*step.hidden, tap]},
        {"positions": step.positions.int()},
        {"num_rejected": step.num_rejected.long()},
        {"slots": step.slots[:0]},
        {"slots": torch.arange(5, dtype=torch.int32)},
        {"last_sampled": step.last_sampled.clone()},
        {"next_prefill_tokens": step.next_prefill_tokens.clone()},
        {"row_bound": 0},
        {"row_bound": SHAPE.max_rows + 1},
        {"temperature": None},
        {"seeds": torch.zeros(4, dtype=torch.int32)},
    ]
    return step._replace(**chance.choice(changes))


@pytest.mark.parametrize("shape", [SHAPE, SAMPLED])
def test_steps_of_a_runner_are_prepared_alike_with_few_looks_and_with_many(shape: GatherShape, kernel: Kernel) -> None:
    """The runner keeps two tensors for its life; the others are new ones in every step, whatever their memory."""
    chance = random.Random(7)
    calls = open_round_calls()
    refills: list[int] = []

    def refill(*arguments: Any) -> int:
        refills.append(calls.refill_gather(*arguments))
        return refills[-1]

    quick = TritonGather(shape, CPU, driver=kernel.driver)
    quick._refill = refill
    first = random_step(shape, CPU, 5, torch.bfloat16)
    for _ in range(2):
        quick.pack(first)
    plain = TritonGather(shape, CPU, driver=kernel.driver)
    plain._refill = None
    plain._places, plain._launches, plain._meta = quick._places, quick._launches, quick._meta
    kept = {name: getattr(first, name) for name in ("last_sampled", "next_prefill_tokens")}
    sizes = [size for _, size in kernel.driver.parameters]

    def prepared(gather: TritonGather, step: StepTensors, rows: int, meta: int) -> Any:
        try:
            address = gather.prepare(step, rows, meta)
        except (ValueError, IndexError, AssertionError) as error:
            return str(error)
        launches = [one for one in gather._launches.values() if one is not None and one.address == address]
        return [(one.grid, parameters_of(one, sizes), gather._enqueued_requests) for one in launches]

    others = 0
    for seed in range(600):
        step = random_step(shape, CPU, seed, torch.bfloat16)
        step = step._replace(**kept, hidden=[one.clone() for one in step.hidden])
        is_other = chance.random() < 0.4
        step = changed(chance, step) if is_other else step
        places = TO[0] + 16 * seed, TO[1] + 4 * seed
        seen = [prepared(gather, step, *places) for gather in (plain, quick)]
        assert seen[0] == seen[1], step
        others += is_other and not isinstance(seen[0], list)
        assert quick.prepare(first, *TO)
    assert sum(requests > 0 for requests in refills) > 500
    assert others > 50
    assert quick.prepare(first, TO[0] + 8, TO[1]) == 0


@pytest.mark.parametrize("has_calls", [True, False])
def test_a_part_of_a_row_is_not_taken_for_a_row(has_calls: bool, kernel: Kernel) -> None:
    """The kernel would read on to what stands behind it."""
    gather = TritonGather(SHAPE, CPU, driver=kernel.driver)
    if not has_calls:
        gather._refill = None
    step = random_step(SHAPE, CPU, 5, torch.bfloat16)
    for _ in range(2):
        gather.pack(step)
    assert gather.prepare(step, *TO)
    narrow = step.hidden[1][:, :24]
    assert narrow.stride() == step.hidden[1].stride()
    with pytest.raises(ValueError, match=r"widths \[32, 24, 32\]"):
        gather.prepare(step._replace(hidden=[step.hidden[0], narrow, step.hidden[2]]), *TO)


@pytest.mark.parametrize("has_calls", [True, False])
def test_a_step_of_another_kind_is_tritons_to_launch(has_calls: bool, kernel: Kernel) -> None:
    """Another kernel may be needed: other types, rows that are not aligned or lie otherwise; and none for no rows."""
    gather = TritonGather(SHAPE, CPU, driver=kernel.driver)
    assert gather._refill is not None
    if not has_calls:
        gather._refill = None
    step = random_step(SHAPE, CPU, 5, torch.bfloat16)
    for _ in range(2):
        gather.pack(step)
    assert len(kernel.driver.launches) == 1
    assert gather.prepare(step, *TO)
    rows = len(step.hidden[0])
    wide = torch.zeros(rows, 3 * 40, dtype=torch.bfloat16)
    others: dict[str, dict[str, Any]] = {
        "types": {"positions": step.positions.int()},
        "hidden": {"hidden": [one.float() for one in step.hidden]},
        "unaligned": {"hidden": [wide[:, 40 * i + i : 40 * i + i + 32] for i in range(3)]},
        "shifted": {
            "hidden": [
                torch.zeros(one.numel() + 8, dtype=one.dtype)[1 : one.numel() + 1].view(one.shape)
                for one in step.hidden
            ]
        },
        "mixed": {"hidden": [step.hidden[0].float(), *step.hidden[1:]]},
        "far": {"hidden": [wide[:, 40 * i : 40 * i + 32] for i in range(3)]},
        "none": {"row_bound": 0},
    }
    for name, change in others.items():
        kernel.calls.clear()
        assert gather.prepare(step, *TO)  # the one before was ordinary
        other = step._replace(**change)
        assert gather.prepare(other, *TO) == 0, name
        gather.pack(other)
        assert len(kernel.calls) == 1, name
    assert len(kernel.driver.launches) == 1


def test_without_a_driver_every_launch_is_tritons(kernel: Kernel) -> None:
    gather = TritonGather(SHAPE, CPU, why_not_direct="planted")
    step = random_step(SHAPE, CPU, 5, torch.bfloat16)
    for _ in range(3):
        assert gather.prepare(step, *TO) == 0
        gather.pack(step)
    assert len(kernel.calls) == 3
    assert gather.how_launched == "by Triton's launcher: planted"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_ctas": 2}, "a launch with attributes"),
        ({"launch_cooperative_grid": True}, "a launch with attributes"),
        ({"launch_pdl": True}, "a launch with attributes"),
        ({"global_scratch_size": 128}, "the kernel uses scratch memory"),
        ({"profile_scratch_size": 16}, "the kernel uses scratch memory"),
        ({"parameters": slice(0, -1)}, "the kernel's parameters lie at"),
        ({"parameters": slice(0, -2)}, "the kernel's parameters lie at"),
        ({"swapped": True}, "the kernel's parameters lie at"),
        ({"signature": "fp32"}, "an argument of type fp32"),
        ({"missing": "launch_pdl"}, "this Triton describes a kernel otherwise"),
        ({"function": None}, "this Triton describes a kernel otherwise"),
    ],
)
def test_a_kernel_that_is_not_quite_as_expected_is_left_to_triton(
    change: dict[str, Any], reason: str, kernel: Kernel
) -> None:
    step = random_step(SHAPE, CPU, 5, torch.bfloat16)
    TritonGather(SHAPE, CPU).pack(step)  # describes the kernel
    assert make_launch(kernel, kernel.driver, len(kernel.names)).function == FUNCTION
    for name, value in change.items():
        if name == "parameters":
            kernel.driver.parameters = kernel.driver.parameters[value]
        elif name == "swapped":
            kernel.driver.parameters[7:9] = kernel.driver.parameters[8:6:-1]
        elif name == "signature":
            kernel.src.signature["n"] = value
        elif name == "missing":
            delattr(kernel.metadata, value)
        else:
            setattr(kernel if name == "function" else kernel.metadata, name, value)
    with pytest.raises(DirectLaunchError, match=reason):
        make_launch(kernel, kernel.driver, len(kernel.names))


def test_a_kernel_of_other_arguments_or_none_is_refused(kernel: Kernel) -> None:
    with pytest.raises(DirectLaunchError, match="Triton interprets"):
        make_launch(None, kernel.driver, 27)
    kernel.src.signature = {"n": "i32"}
    with pytest.raises(DirectLaunchError, match="has 1 arguments, expected 27"):
        make_launch(kernel, kernel.driver, 27)


def test_a_refusal_is_kept_as_the_reason(kernel: Kernel) -> None:
    kernel.metadata.launch_pdl = True
    gather = TritonGather(SHAPE, CPU, driver=kernel.driver)
    step = random_step(SHAPE, CPU, 5, torch.bfloat16)
    for _ in range(3):
        gather.pack(step)
    assert len(kernel.calls) == 3
    assert gather.how_launched == (
        "by Triton's launcher: a launch with attributes: ctas, cooperative, dependent: (1, False, True)"
    )


class Silent(Driver):
    """Does not say how a kernel takes its parameters."""

    def layout(self, function: int) -> Layout:
        raise DriverError("cuFuncGetParamInfo: planted (999)")


def test_what_the_driver_does_not_say_is_the_reason_and_every_launch_is_tritons(kernel: Kernel) -> None:
    gather = TritonGather(SHAPE, CPU, driver=Silent())
    step = random_step(SHAPE, CPU, 5, torch.bfloat16)
    for _ in range(3):
        gather.pack(step)
    assert len(kernel.calls) == 3
    assert gather.how_launched == "by Triton's launcher: cuFuncGetParamInfo: planted (999)"
