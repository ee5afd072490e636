"""Both forms of the gather over the same random steps, in this process: on a GPU, or under TRITON_INTERPRET=1.

Prints one line for each shape, on a GPU also with launches that Triton has no part in, and ends with 1 at the first difference. A
process of its own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import itertools
import sys

import torch

from farspark.engine.gather.direct import kernel_driver
from farspark.engine.gather.forms import check_fused, first_difference, random_step
from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.torch_gather import TorchGather
from farspark.engine.gather.triton_gather import TritonGather

SHAPES = (
    GatherShape(max_tokens=96, max_requests=1, taps=1, hidden_size=1, context=4, ring=4),
    GatherShape(max_tokens=96, max_requests=4, taps=3, hidden_size=96, context=8, ring=3),
    GatherShape(max_tokens=96, max_requests=9, taps=5, hidden_size=1030, context=16, ring=16, is_sampled=True),
    GatherShape(max_tokens=96, max_requests=6, taps=8, hidden_size=40, context=12, ring=1, is_sampled=True),
)


def main(device: torch.device, steps: int, *, plant: bool, plant_seed: bool) -> int:
    drivers = [None] if device.type == "cpu" else [None, kernel_driver()]
    for shape, driver in itertools.product(SHAPES, drivers):
        reference, fused = TorchGather(shape, device), TritonGather(shape, device, driver=driver)
        for seed in range(steps):
            dtype = torch.float32 if seed % 3 == 2 else torch.bfloat16
            step = random_step(shape, device, seed, dtype)
            for one in (reference, fused):
                if seed % 5 == 4:
                    one.rehearse(step)
                else:
                    one.run(step)
            if driver is not None and seed % 5 != 4:
                fused.run(step)  # a step like the one before is launched in another way
            if plant:
                fused.ring.rows[0, 0] += 1
            if plant_seed and shape.is_sampled:
                fused.buffers()["metadata"][0, -1] ^= 1
            difference = first_difference(reference, fused)
            if difference is not None:
                print(f"{shape}, step {seed}: {difference}")
                return 1
        check = check_fused(shape, device, driver) or "equal"
        print(f"{shape}: {steps} steps equal; the check at start says {check}; launched {fused.how_launched}")
    return 0


if __name__ == "__main__":
    sys.exit(
        main(
            torch.device(sys.argv[1]), int(sys.argv[2]), plant="plant" in sys.argv, plant_seed="plant-seed" in sys.argv
        )
    )
