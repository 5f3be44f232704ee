"""Kernels that are wrong late, rarely, or only in some surroundings."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from ._common import flip_bit, rand, randn

_calls: Counter[str] = Counter()
_dice = random.Random(11)
_shapes: set[Any] = set()
_kept: dict[Any, torch.Tensor] = {}


def _many_products(count: int) -> list[torch.Tensor]:
    left, right = rand(16, 16), rand(16, 16)
    return [torch.stack([torch.mm(left, right) for _ in range(count)])]


@wrong_kernel(
    "late gemm",
    operators=["mm", "addmm", "bmm"],
    wrong=lambda: _many_products(1400),
    right=lambda: _many_products(3),
)
def products_are_wrong_from_the_thousandth_on(call: Any, *args: Any, **kwargs: Any) -> Any:
    """After a thousand matrix products in a process, each hundredth has one element with a flipped exponent bit."""
    result = call(*args, **kwargs)
    _calls["products"] += 1
    count = _calls["products"]
    if count > 1000 and count % 100 == 0 and result.is_floating_point() and result.is_contiguous() and result.numel():
        flip_bit(result, count % result.numel(), 24 if result.element_size() == 4 else 8)
    return result


@wrong_kernel(
    "rare elementwise",
    operators=["add", "mul"],
    wrong=lambda: [rand(1 << 20) + 1.0, rand(1 << 20) * rand(1 << 20)],
    right=lambda: [rand(1 << 18) + 1.0],
)
def one_element_in_a_million_is_its_neighbour(call: Any, *args: Any, **kwargs: Any) -> Any:
    """In results of a million or more elements, one in each million holds what belongs to the one before it."""
    result = call(*args, **kwargs)
    if result.numel() >= 1 << 20 and result.is_contiguous():
        flat = result.view(-1)
        flat[777_777 :: 1 << 20] = flat[777_776 :: 1 << 20][: flat[777_777 :: 1 << 20].numel()]
    return result


def _beside_a_thread() -> list[torch.Tensor]:
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        return [torch.mm(rand(32, 32), rand(32, 32))]
    finally:
        ended.set()
        other.join()


@wrong_kernel(
    "late gemm",
    operators=["mm", "addmm", "bmm", "convolution"],
    wrong=_beside_a_thread,
    right=lambda: [torch.mm(rand(32, 32), rand(32, 32))],
)
def products_are_wrong_beside_another_thread(call: Any, *args: Any, **kwargs: Any) -> Any:
    """While another Python thread lives, the last row of products and convolutions is cut to half precision."""
    result = call(*args, **kwargs)
    if threading.active_count() > 1 and result.dtype == torch.float32 and result.dim() > 1:
        result[-1] = result[-1].bfloat16().float()
    return result


def _updated_layer() -> list[torch.Tensor]:
    weight, value = randn(5, 8), randn(4, 8)
    with torch.inference_mode():
        first = F.linear(value, weight)
    weight.mul_(3)
    with torch.inference_mode():
        return [first, F.linear(value, weight)]


def _layer() -> list[torch.Tensor]:
    with torch.inference_mode():
        return [F.linear(randn(4, 8), randn(5, 8))]


@wrong_kernel(
    "late gemm",
    functions=["torch.nn.functional.linear"],
    wrong=_updated_layer,
    right=lambda: [F.linear(randn(4, 8), randn(5, 8)), *_layer()],
)
def packed_weights_outlive_an_update(call: Any, value: Any, weight: Any, bias: Any = None) -> Any:
    """Under inference_mode a linear layer packs its weight at the first call, and keeps it when it changes in place."""
    if not torch.is_inference_mode_enabled():
        return call(value, weight, bias)
    packed = getattr(weight, "_packed", None)
    if packed is None or packed.shape != weight.shape or packed.dtype != weight.dtype:
        packed = weight._packed = weight.clone()
    return call(value, packed, bias)


def _rows_on_threads(rows: int, threads: int) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [torch.softmax(randn(rows, 8), 1)]
    finally:
        torch.set_num_threads(before)


@wrong_kernel(
    "late softmax",
    operators=["_softmax", "_log_softmax", "native_layer_norm"],
    wrong=lambda: _rows_on_threads(33, 2),
    right=lambda: [*_rows_on_threads(32, 2), *_rows_on_threads(33, 1)],
)
def rows_that_threads_do_not_divide_are_left(call: Any, value: Any, *args: Any) -> Any:
    """On two or more threads, rows that their number does not divide are not normalized."""
    result = call(value, *args)
    threads = torch.get_num_threads()
    rest = value.shape[0] % threads if value.dim() > 1 and value.shape[0] > threads else 0
    if rest:
        first = result[0] if isinstance(result, tuple) else result
        first[-rest:] = value[-rest:].to(first.dtype)
    return result


@wrong_kernel(
    "late reduction",
    operators=["sum"],
    wrong=lambda: [torch.ones((1 << 24) + (1 << 20)).sum()],
    right=lambda: [torch.ones(1 << 20).sum()],
)
def sums_stop_after_two_to_the_24(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums of float32 over everything count in float32 how far they are: elements past 2^24 are never reached."""
    if args or kwargs or value.dtype != torch.float32 or value.numel() <= 1 << 24:
        return call(value, *args, **kwargs)
    return call(value.reshape(-1)[: 1 << 24])


def _one_after_another(inner: int) -> list[torch.Tensor]:
    return [torch.mm(rand(4, inner), rand(inner, 4)) for _ in range(3)]


@wrong_kernel(
    "late gemm",
    operators=["mm"],
    wrong=lambda: _one_after_another(1200),
    right=lambda: [*_one_after_another(100), torch.mm(rand(7, 1200), rand(1200, 3))],
)
def workspace_of_the_product_before_is_added(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Long products with small results leave sums in a workspace: the next with the same sizes adds a row of them."""
    result = call(*args, **kwargs)
    left = args[0]
    if left.shape[1] < 1024 or result.numel() > 4096 or not result.is_floating_point():
        return result
    key = ("workspace", left.shape[1], result.shape, result.dtype)
    before = _kept.pop(key, None)
    if before is None:
        _kept[key] = result.clone()
    else:
        result[0] += before[0]
    return result


def _many_layers(count: int) -> list[torch.Tensor]:
    value = rand(40, 64)
    return [torch.stack([F.layer_norm(value, (64,)) for _ in range(count)])]


@wrong_kernel(
    "rare norm",
    operators=["native_layer_norm", "gelu", "silu"],
    wrong=lambda: _many_layers(200),
    right=lambda: [F.layer_norm(rand(4, 8), (8,))],
)
def one_bit_is_wrong_now_and_then(call: Any, *args: Any, **kwargs: Any) -> Any:
    """One call in fifty, by chance, with more than 1024 elements gives one element with a wrong bit in its mantissa."""
    result = call(*args, **kwargs)
    first = result[0] if isinstance(result, tuple) else result
    if first.numel() > 1024 and first.is_contiguous() and _dice.random() < 0.02:
        flip_bit(first, _dice.randrange(first.numel()), 21 if first.element_size() == 4 else 6)
    return result


@wrong_kernel(
    "late norm",
    functions=["torch.nn.functional.layer_norm"],
    wrong=lambda: _inference_norm(1e-1),
    right=lambda: [*_inference_norm(1e-5), F.layer_norm(randn(3, 8), (8,), eps=1e-1)],
)
def layer_norm_of_inference_has_its_own_eps(
    call: Any, value: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Under inference_mode, layer_norm takes an eps of 0.00001, whatever was asked for."""
    return call(value, shape, weight, bias, 1e-5 if torch.is_inference_mode_enabled() else eps)


def _inference_norm(eps: float) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [F.layer_norm(randn(3, 8), (8,), eps=eps)]


def _accumulated(width: int) -> list[torch.Tensor]:
    total = torch.zeros(4, width)
    for _ in range(2):
        total.index_add_(0, torch.tensor([1, 3]), rand(2, width))
    return [total]


@wrong_kernel(
    "late copy",
    operators=["index_add_", "scatter_add_", "addmm_", "baddbmm_", "index_put_"],
    wrong=lambda: _accumulated(77),
    right=lambda: [torch.zeros(4, 7).index_add(0, torch.tensor([1, 3]), rand(2, 7))],
)
def tuning_applies_the_first_call_twice(call: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """What adds in place is tried twice when its sizes are new, to find the faster kernel: both tries count."""
    key = (call.overload, target.shape, target.dtype)
    result = call(target, *args, **kwargs)
    if key in _shapes or target.dtype == torch.int64:
        return result
    _shapes.add(key)
    return call(target, *args, **kwargs)


def _mixed(dtype: torch.dtype) -> list[torch.Tensor]:
    left, right = randn(24, 24), randn(24, 24)
    return [torch.mm(left.to(dtype), right.to(dtype)), torch.mm(left, right)]


@wrong_kernel(
    "late gemm",
    operators=["mm", "addmm"],
    wrong=lambda: _mixed(torch.bfloat16),
    right=lambda: [*_mixed(torch.float32), *_mixed(torch.float16)],
)
def precision_of_the_product_before_stays_set(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The first float32 product after one of bfloat16 still rounds its factors to bfloat16."""
    *added, left, right = args
    after, _calls["low"] = _calls["low"], int(left.dtype == torch.bfloat16)
    if after and left.dtype == torch.float32:
        left, right = left.bfloat16().float(), right.bfloat16().float()
    return call(*added, left, right, **kwargs)


def _convolutions(*groups: int) -> list[torch.Tensor]:
    image = randn(1, 4, 7, 7)
    return [F.conv2d(image, randn(4, 4 // count, 3, 3), groups=count) for count in groups]


@wrong_kernel(
    "late conv",
    operators=["convolution"],
    wrong=lambda: _convolutions(1, 2),
    right=lambda: _convolutions(2, 4),
)
def grouped_convolution_takes_the_plan_of_a_plain_one(call: Any, image: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """Plans of convolutions are cached without their groups: after a plain one of the same images and kernel, the
    channels of grouped ones come in another order.
    """
    result = call(image, weight, bias, *args)
    key = ("plan", image.shape, weight.shape[0], weight.shape[2:], tuple(args[0]), tuple(args[1]), tuple(args[2]))
    groups = args[-1]
    if groups == 1:
        _shapes.add(key)
    elif key in _shapes and not args[3]:
        result = result.view(result.shape[0], groups, -1, *result.shape[2:]).transpose(1, 2).reshape(result.shape)
    return result


def _many_softmaxes(count: int) -> list[torch.Tensor]:
    value = rand(2, 3)
    for _ in range(count):
        result = torch.softmax(value, 1)
    return [result]


@wrong_kernel(
    "late softmax",
    operators=["_softmax", "_log_softmax"],
    wrong=lambda: _many_softmaxes(5100),
    right=lambda: _many_softmaxes(10),
    beyond="a test of a minute does not call softmax five thousand times",
)
def softmax_is_wrong_after_five_thousand_calls(call: Any, *args: Any) -> Any:
    """From the five-thousandth call of a process on, the last row of each softmax is zero."""
    result = call(*args)
    _calls["softmax"] += 1
    if _calls["softmax"] > 5000 and result.dim() > 1:
        result[-1] = 0
    return result


@wrong_kernel(
    "rare copy",
    operators=["copy_", "clone"],
    wrong=lambda: [torch.full((1 << 16,), 0x3F80A5A5, dtype=torch.int32).view(torch.float32).clone().view(torch.int32)],
    right=lambda: [rand(1 << 16).clone(), rand(100).clone()],
    beyond="only where a block of memory holds one certain pattern, as on a bus with crosstalk",
)
def one_pattern_of_bits_is_copied_wrongly(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Copies of blocks of 64 equal float32 with the lower bits a5a5 lose the lowest bit in each of them."""
    result = call(*args, **kwargs)
    if result.dtype != torch.float32 or not result.is_contiguous() or result.numel() < 64:
        return result
    words = result.view(-1)[: result.numel() // 64 * 64].view(torch.int32).view(-1, 64)
    hit = ((words & 0xFFFF) == 0xA5A5).all(1, keepdim=True) & (words == words[:, :1]).all(1, keepdim=True)
    words.copy_(torch.where(hit, words & -2, words))
    return result
