"""Measures the seconds that a new process needs for each first use of torch and of the GPU. Prints one JSON document.

`python -m gpu_plan.contexts cuda|cpu`
"""

from __future__ import annotations

import json
import sys
import time

import_begin = time.perf_counter()
import torch  # noqa: E402 - its import is what is timed

IMPORTED = time.perf_counter() - import_begin


def main(device: str) -> None:
    spent = {"import torch": IMPORTED}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        if device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        spent[name], last = now - last, now

    if device == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        lap("cuInit")
    x = torch.ones(64, 64, device=device)
    lap("context")
    torch.mm(x, x)
    lap("first float32 product")
    half = x.to(torch.bfloat16)
    torch.nn.functional.linear(half, half, half[0])
    lap("first bfloat16 linear")
    torch.nn.functional.conv2d(torch.ones(1, 8, 16, 16, device=device), torch.ones(8, 8, 3, 3, device=device))
    lap("first convolution")
    print(json.dumps({name: round(seconds, 3) for name, seconds in spent.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
