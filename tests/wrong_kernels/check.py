"""Check that each wrong kernel is wrong for its stated call, and right for the other.

python -m wrong_kernels.check MODULE [NAME...]
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import torch

from . import KERNELS, Results, WrongKernel, installed

MATERIAL = 8  # roundings of the largest element: what a wrong result differs by at least


def fault(kernel: WrongKernel) -> str | None:
    """Return how a wrong kernel deviates from its statements; None if it does not."""
    before, after = _with_and_without(kernel, kernel.right)
    if not all(_same(*pair) for pair in zip(before, after, strict=False)) or len(before) != len(after):
        return "the call that should stay right gives other results"
    before, after = _with_and_without(kernel, kernel.wrong)
    if len(before) == len(after) and not any(_material(*pair) for pair in zip(before, after, strict=False)):
        return "the call that should be wrong is right"
    return None


def _with_and_without(kernel: WrongKernel, call: Callable[[], Results]) -> tuple[Results, Results]:
    torch.manual_seed(0)
    before = [result.detach().clone() for result in call()]
    with installed(kernel):
        torch.manual_seed(0)
        after = [result.detach().clone() for result in call()]
    return before, after


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def _material(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not _same(a[~finite], b[~finite]):
        return True
    a, b = a[finite], b[finite]
    unit = torch.finfo(a.dtype).eps
    a, b = a.to(torch.float64), b.to(torch.float64)
    distance = (a - b).abs()
    return bool(a.numel()) and not bool((distance <= MATERIAL * unit * a.abs().max()).all())


def main() -> int:
    module, names = sys.argv[1], sys.argv[2:]
    importlib.import_module(module)
    half = module.split(".")[1]
    chosen = [name for name in KERNELS if name.startswith(f"{half}/") and (not names or name.split("/")[1] in names)]
    found = {name: fault(KERNELS[name]) for name in chosen}
    for name, problem in found.items():
        print(f"{name}: {problem or 'ok'}")
    print(f"{len(found)} wrong kernels, {sum(map(bool, found.values()))} not as they should be")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
