"""Holds a share of the GPU's memory until stdin ends: `python -m gpu_plan.hold_memory cuda|cpu SHARE`.

Prints the number of bytes once they are allocated. On the CPU, for a trial of the plan, it holds 64 MiB.
"""

from __future__ import annotations

import sys

import torch

_ON_CPU = 64 << 20


def main(device: str, share: float) -> None:
    size = int(share * torch.cuda.mem_get_info()[1]) if device == "cuda" else _ON_CPU
    # Allocating GPU memory is enough to occupy it. It is not written to, because a simulated GPU uses the host's
    # memory.
    held = torch.empty(size, dtype=torch.uint8, device=device)
    print(held.numel(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
