"""The seeded faults of tests/selftest/seeds for a run on a GPU, and the expected result of each.

`python -m gpu_plan.seeds FOLDER` prints {"wrong": {seed: kind of failure}, "right": [...], "variables": {...}} as JSON,
after it has compiled the library that some seeds call into the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from selftest.seeds.on_gpus import PROBES as PROBES

from envbuild.selftest.probes.hardware import burn, memory

# The sizes at which the seeded kernels are wrong. They are the CPU's sizes, which a GPU can compute too.
burn.SIDE = burn.SIDE_CPU
memory.CHUNK, memory.chunks_to_write = memory.CHUNK_CPU, lambda free: memory.CHUNKS_CPU


def main(folder: str) -> None:
    from selftest import seeding
    from selftest.seeds import failures

    on_gpu = torch.cuda.is_available()
    expected = {
        "wrong": {seed: failure for seed, failure, _ in (failures.WRONG_ON_GPUS if on_gpu else failures.WRONG)},
        "right": failures.RIGHT_ON_GPUS if on_gpu else failures.RIGHT,
        "variables": seeding.library(Path(folder)),
    }
    print(json.dumps(expected))


if __name__ == "__main__":
    main(sys.argv[1])
