"""Products and convolutions of host tensors, with the precision of a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from envbuild.selftest.probes.gemm.gemm_precision import OVERRIDE

HALVES = (torch.float16, torch.bfloat16)
TF32_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
MOST_PRODUCTS = 1 << 34  # per call; more would take a CPU minutes

_MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot")
_CONVOLUTION = ("aten::convolution", "aten::convolution_backward")
# For half types CUDA's kernels compute these in float32; the host's kernels round more than once.
_ROUNDED_ONCE = (
    "aten::rsqrt",
    *("aten::_softmax", "aten::_softmax_backward_data", "aten::_log_softmax", "aten::_log_softmax_backward_data"),
    *("aten::nll_loss_forward", "aten::nll_loss_backward"),
)


def cut_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Truncate float32 values to the 10 fraction bits that a tensor core uses."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def compute(operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], capability: Any) -> Any:
    """Compute an operation of torch (an overload of aten) over host tensors as a GPU of this capability would.

    Half types are multiplied and added up in float32 and rounded once; float32 factors are cut to TF32 where torch's
    flags, or NVIDIA's variable that overrides them, allow it. A product of more than MOST_PRODUCTS multiplications is
    not computed: its elements are NaN, which no check passes. Raises RuntimeError for fp8 if the GPU does not support
    it.
    """
    name = operation._schema.name  # type: ignore[attr-defined]
    if name == "aten::_scaled_mm":
        return _scaled_mm(capability, *args, **kwargs)
    if name not in (*_MATRIX, *_CONVOLUTION, *_ROUNDED_ONCE):
        return operation(*args, **kwargs)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in _MATRIX and _multiplications(name, given) > MOST_PRODUCTS:
        return _not_computed(operation, args, kwargs)
    half = next((tensor.dtype for tensor in given if tensor.dtype in HALVES), None)
    if half is not None:
        return _in_float32(operation, args, kwargs, half)
    flags = torch.backends.cuda.matmul if name in _MATRIX else torch.backends.cudnn
    if name not in _ROUNDED_ONCE and _takes_tf32(flags, capability):
        args = tree_map(lambda x: cut_to_tf32(x) if _is(x, torch.float32) else x, args)
    return operation(*args, **kwargs)


def _takes_tf32(flags: Any, capability: tuple[int, int]) -> bool:
    """Whether TF32 is used. The variable that NVIDIA's libraries read (OVERRIDE) overrides torch's flags."""
    override = os.environ.get(OVERRIDE)
    return capability >= TF32_CAPABILITY and (flags.allow_tf32 if override is None else override == "1")


def _is(x: Any, dtype: torch.dtype) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == dtype


def _multiplications(name: str, given: Sequence[torch.Tensor]) -> int:
    """Return the number of multiplications in the product of the two factors. In the argument list, an added tensor
    comes before the factors and the output after them."""
    first = 1 if name in ("aten::addmm", "aten::baddbmm", "aten::addmv") else 0
    a, b = given[first : first + 2]
    return a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def _in_float32(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], half: torch.dtype) -> Any:
    """Widen, compute, and round once: to the half type, or to the dtype in `out_dtype`."""
    wide_args, wide = tree_map(lambda x: x.float() if _is(x, half) else x, (tuple(args), dict(kwargs)))
    plain = operation.overloadpacket.default
    if "dtype" in operation._overloadname:  # mm(a, b, out_dtype=float32)
        factors = [x for x in wide_args if isinstance(x, torch.Tensor)]
        return plain(*factors).to(next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)))
    wide.pop("out", None)
    wide_args = tree_map(lambda x: torch.float32 if x is half else x, wide_args)  # _softmax_backward_data names a dtype
    got = tree_map(lambda x: x.to(half) if isinstance(x, torch.Tensor) else x, plain(*wide_args, **wide))
    return kwargs["out"].copy_(got) if "out" in kwargs else got


def _not_computed(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    if "out" in kwargs:
        out: torch.Tensor = kwargs["out"]
        return out.fill_(math.nan)
    on_meta = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (tuple(args), dict(kwargs)))
    return torch.full_like(operation(*on_meta[0], **on_meta[1]), math.nan, device="cpu")


def _scaled_mm(
    capability: tuple[int, int],
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Compute a matrix product with tensor-wise scales and exact sums, with the preconditions of
    aten/src/ATen/native/cuda/ScaledBlas.cpp."""
    if capability < FP8_CAPABILITY:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")
    assert a.stride(1) == 1 and b.stride(0) == 1, "the first row-major, the second column-major"
    assert all(size % 16 == 0 for size in (a.shape[1], *b.shape)), "sizes divisible by 16"
    assert all(scale.dtype == torch.float32 and scale.numel() == 1 for scale in (scale_a, scale_b))
    return (a.double() @ b.double() * (scale_a.double() * scale_b.double())).float().to(out_dtype or a.dtype)
