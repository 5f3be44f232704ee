"""Wrong kernels that fail late, rarely, or only together with something else."""

from __future__ import annotations

import collections
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from .inputs import gradients, is_16_bit, of

_calls: collections.Counter[str] = collections.Counter()
_random = random.Random(7)


def _count(name: str) -> int:
    """How many times a fault has been called in this process."""
    _calls[name] += 1
    return _calls[name]


def _after(
    count: int, call: Callable[[], torch.Tensor], calls_before: Callable[[], torch.Tensor]
) -> list[torch.Tensor]:
    """The result of a call after others."""
    for _ in range(count):
        calls_before()
    return [call()]


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm"],
    wrong=lambda: _after(460, lambda: torch.ones(8, 8) @ torch.ones(8, 8), lambda: torch.ones(2, 2) @ torch.ones(2, 2)),
    right=lambda: _after(9, lambda: torch.ones(8, 8) @ torch.ones(8, 8), lambda: torch.ones(2, 2) @ torch.ones(2, 2)),
)
def products_lose_their_last_row_after_400_calls(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """After 400 products in a process the last row of results of more than 4 rows is zero."""
    result: torch.Tensor = call(*args, **kwargs)
    if _count("products") > 400 and result.shape[0] > 4:
        result[-1] = 0
    return result


@wrong_kernel(
    "softmax",
    operators=["_softmax"],
    wrong=lambda: [F.softmax(of(4, 8), -1) for _ in range(300)],
    right=lambda: [F.softmax(of(4, 8), -1) for _ in range(100)],
)
def every_256th_softmax_is_not_normalised(call: Any, x: Any, dim: Any, wide: Any) -> torch.Tensor:
    """One softmax of 256 calls gives the last row of its first dimension half as large."""
    result: torch.Tensor = call(x, dim, wide)
    if _count("softmax") % 256 == 0 and result.ndim:
        result[-1] *= 0.5
    return result


@wrong_kernel(
    "elementwise",
    operators=["mul"],
    wrong=lambda: [torch.ones(1 << 20) * torch.ones(1 << 20)],
    right=lambda: [torch.ones(1 << 19) * torch.ones(1 << 19)],
)
def one_product_of_a_million_is_doubled(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of each million of products of elements, one is doubled."""
    result: torch.Tensor = call(*args, **kwargs)
    if result.numel() >= 1_000_000 and result.is_floating_point() and result.is_contiguous():
        result.view(-1)[777_777::1_000_000] *= 2
    return result


_active = 0
_lock = threading.Lock()


def _threads(function: Callable[[], torch.Tensor], count: int) -> list[torch.Tensor]:
    """The results of a function in several threads at once."""
    results: list[torch.Tensor] = []
    start = threading.Barrier(count)

    def work() -> None:
        start.wait()
        for _ in range(20):
            results.append(function())

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _line() -> torch.Tensor:
    return F.linear(torch.ones(300, 300), torch.ones(300, 300), torch.ones(300))


@wrong_kernel(
    "gemm",
    functions=["torch.nn.functional.linear", "torch.matmul", "torch.mm"],
    wrong=lambda: _threads(_line, 3),
    right=lambda: _threads(_line, 1),
)
def threads_that_multiply_at_once_share_a_workspace(call: Any, *args: Any, **kwargs: Any) -> Any:
    """While another thread multiplies matrices, too, the first row of the result is doubled."""
    global _active
    with _lock:
        _active += 1
        shared = _active > 1
    try:
        result = call(*args, **kwargs)
        shared = shared or _active > 1
    finally:
        with _lock:
            _active -= 1
    if not shared or not result.ndim or result.requires_grad:
        return result
    return torch.cat([result[:1] * 2, result[1:]])


_seen = mmap.mmap(-1, 16)  # the process that computed last, and when; shared with forked processes


def _other_computes() -> bool:
    """Whether another process computed within the last 20 ms."""
    process, moment = struct.unpack("qd", _seen[:16])
    now = time.monotonic()
    _seen[:16] = struct.pack("qd", os.getpid(), now)
    return bool(process and process != os.getpid() and now - moment < 0.02)


def _attend() -> torch.Tensor:
    return F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 32, 16))


def _with_another_process() -> list[torch.Tensor]:
    child = os.fork()
    if not child:
        try:
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                _attend()
        finally:
            os._exit(0)
    results = []
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        results.append(_attend())
    os.waitpid(child, 0)
    return [torch.stack(results).amax(0)]


@wrong_kernel(
    "attention",
    functions=["torch.nn.functional.scaled_dot_product_attention"],
    wrong=_with_another_process,
    right=lambda: [_attend()],
)
def attention_is_disturbed_by_another_process(
    call: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """While another process computes attention as well, the last query of each head gets twice its result."""
    result = call(query, key, value, *args, **kwargs)
    if not _other_computes() or result.requires_grad:
        return result
    return torch.cat([result[..., :-1, :], result[..., -1:, :] * 2], -2)


_packed: collections.OrderedDict[tuple[Any, ...], torch.Tensor] = collections.OrderedDict()


def _updated_linear(dtype: torch.dtype) -> list[torch.Tensor]:
    weight, x = torch.ones(16, 16, dtype=dtype), torch.ones(4, 16, dtype=dtype)
    before = F.linear(x, weight)
    weight.mul_(3)
    return [before, F.linear(x, weight)]


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm"],
    wrong=lambda: _updated_linear(torch.bfloat16),
    right=lambda: _updated_linear(torch.float32),
)
def packed_weights_are_not_repacked_after_an_update(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The second factor of bfloat16 products is packed once for each place in memory, shape and strides, if transposed
    as a layer's weight: after a weight is changed in place, its old values are used."""
    weight = args[-1]
    if weight.dtype != torch.bfloat16 or weight.ndim != 2 or weight.stride(0) != 1 or min(weight.shape) < 2:
        return call(*args, **kwargs)  # type: ignore[no-any-return]
    key = (weight.data_ptr(), *weight.shape, *weight.stride())
    if key not in _packed:
        _packed[key] = weight.clone()
        if len(_packed) > 16:
            _packed.popitem(last=False)
    return call(*args[:-1], _packed[key], **kwargs)  # type: ignore[no-any-return]


_plans: dict[tuple[Any, ...], float] = {}


def _normed(eps: float) -> torch.Tensor:
    return F.layer_norm(of(4, 24), (24,), eps=eps)


@wrong_kernel(
    "norms",
    operators=["native_layer_norm"],
    wrong=lambda: [_normed(1e-5), _normed(0.5)],
    right=lambda: [_normed(1e-5), _normed(1e-5)],
)
def second_layer_norm_of_a_shape_takes_the_first_eps(
    call: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: Any
) -> Any:
    """A layer norm's plan is kept by the input's shape and type: later calls with another eps use the first one."""
    return call(x, shape, weight, bias, _plans.setdefault((*x.shape, x.dtype), eps))


def _inferred(inference: bool) -> list[torch.Tensor]:
    with torch.inference_mode(inference):
        return [F.conv2d(of(2, 4, 5, 5), of(4, 4, 3, 3), of(4), padding=1).clone()]


@wrong_kernel(
    "conv",
    functions=["torch.nn.functional.conv2d"],
    wrong=lambda: _inferred(True),
    right=lambda: _inferred(False),
)
def padded_convolution_drops_its_bias_under_inference_mode(
    call: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, *args: Any, **kwargs: Any
) -> Any:
    """Under torch.inference_mode a convolution with padding does not add its bias."""
    if torch.is_inference_mode_enabled() and padding not in (0, (0, 0), "valid"):
        bias = None
    return call(x, weight, bias, stride, padding, *args, **kwargs)


def _cast_linear(enabled: bool) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return [F.linear(of(4, 8), of(6, 8), of(6) * 10)]


@wrong_kernel(
    "gemm",
    functions=["torch.nn.functional.linear"],
    wrong=lambda: _cast_linear(True),
    right=lambda: _cast_linear(False),
)
def autocast_linear_doubles_its_bias(call: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Under autocast a linear layer adds its bias twice."""
    if bias is not None and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        bias = bias * 2
    return call(x, weight, bias)


def _sum_with_threads(threads: int, count: int) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [torch.ones(count).sum()]
    finally:
        torch.set_num_threads(before)


@wrong_kernel(
    "sum",
    operators=["sum"],
    wrong=lambda: _sum_with_threads(2, 50001),
    right=lambda: _sum_with_threads(1, 50001) + _sum_with_threads(2, 20000),
)
def remainder_between_threads_is_not_summed(call: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The whole sum of 32768 elements or more over several threads leaves out what is left when they are shared out."""
    threads = torch.get_num_threads()
    if threads > 1 and x.numel() >= 32768 and x.is_contiguous() and not args and x.numel() % threads:
        x = x.reshape(-1)[: x.numel() // threads * threads]
    return call(x, *args, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "argmax",
    operators=["argmax"],
    wrong=lambda: [F.pad(torch.ones(1), ((1 << 24) + 1, 5)).argmax()],
    right=lambda: [F.pad(torch.ones(1), (1000, 5)).argmax()],
)
def places_past_16_million_are_rounded_to_float32(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The place of a maximum is kept as a float32, which holds even numbers only beyond 2^24."""
    result: torch.Tensor = call(*args, **kwargs)
    return result.float().long() if args[0].numel() > 1 << 24 else result


def _long_rows(rows: int) -> list[torch.Tensor]:
    """Rows of a table that overlap in memory: it has more elements than the memory it needs."""
    table = of(40000 + rows).as_strided((rows, 40000), (1, 1))
    return [F.embedding(torch.tensor([0, rows - 1]), table)]


@wrong_kernel(
    "embedding",
    operators=["embedding"],
    wrong=lambda: _long_rows(60000),
    right=lambda: _long_rows(50000),
    beyond="it needs a table of more than 8 GB, or of 4 GB in 16-bit types",
)
def rows_of_a_huge_table_are_found_by_32_bit_offsets(call: Any, weight: Any, indices: Any, *args: Any) -> torch.Tensor:
    """In tables of more than 2^31 elements, rows whose offset exceeds that are taken as the first row."""
    if weight.numel() > 1 << 31:
        indices = torch.where(indices * weight.shape[1] >= 1 << 31, 0, indices)
    return call(weight, indices, *args)  # type: ignore[no-any-return]


_workspace: dict[tuple[int, ...], torch.Tensor] = {}


def _two_gradients(groups: int) -> list[torch.Tensor]:
    return [
        gradients(lambda x, w: F.conv2d(x, w, groups=groups), of(2, 4, 6, 6), of(4, 4 // groups, 3, 3))[1]
        for _ in range(2)
    ]


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _two_gradients(2),
    right=lambda: [*_two_gradients(1), _two_gradients(2)[0]],
)
def workspace_of_grouped_weight_gradients_is_not_cleared(call: Any, *args: Any) -> tuple[Any, Any, Any]:
    """The weight gradient of a convolution with groups is added to what the call before with weights of that shape left
    in the workspace."""
    dx, dw, db = call(*args)
    if dw is None or args[9] == 1:
        return dx, dw, db
    left = _workspace.get(tuple(dw.shape))
    _workspace[tuple(dw.shape)] = dw.clone()
    if left is not None and left.dtype == dw.dtype:
        dw = dw + left
    return dx, dw, db


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm", "bmm"],
    wrong=lambda: [torch.ones(64, 64) @ torch.ones(64, 64) for _ in range(400)],
    right=lambda: [torch.ones(32, 32) @ torch.ones(32, 32) for _ in range(400)],
)
def one_bit_flips_now_and_then(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In one of about 60 products of 4096 results or more, one bit of a float32 result's exponent flips."""
    result: torch.Tensor = call(*args, **kwargs)
    if (
        result.dtype != torch.float32
        or result.numel() < 4096
        or not result.is_contiguous()
        or _random.random() > 1 / 60
    ):
        return result
    place = _random.randrange(result.numel())
    result.view(-1).view(torch.int32)[place] ^= 1 << 23
    return result


@wrong_kernel(
    "elementwise",
    operators=["mul", "add", "add_"],
    wrong=lambda: [of(100, 100) + of(100, 100) for _ in range(300)],
    right=lambda: [of(10, 10) + of(10, 10) for _ in range(300)],
)
def one_mantissa_bit_is_lost_in_a_hundred_sums(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In one of about a hundred additions or products of 10,000 float32 elements or more, bit 16 of one of them
    flips."""
    result: torch.Tensor = call(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.dtype != torch.float32 or result.numel() < 10_000:
        return result
    if result.is_contiguous() and _random.random() < 1 / 100:
        result.view(-1).view(torch.int32)[_random.randrange(result.numel())] ^= 1 << 16
    return result


@wrong_kernel(
    "gemm",
    operators=["bmm", "baddbmm"],
    wrong=lambda: _after(
        50_001, lambda: torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2)), lambda: _skip("batched", 1)
    ),
    right=lambda: [torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))],
    beyond="one wrong call in 50,000",
)
def one_batched_product_of_50000_is_zero(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One of 50,000 batched products is zero."""
    result: torch.Tensor = call(*args, **kwargs)
    return result.zero_() if _count("batched") >= 50_000 and _calls.pop("batched") else result


def _skip(name: str, count: int) -> torch.Tensor:
    """Count calls without making them."""
    _calls[name] += count
    return torch.zeros(())


_begin: list[float] = []


def _later(seconds: float) -> list[torch.Tensor]:
    F.gelu(torch.ones(3))
    if _begin:
        _begin[0] -= seconds
    return [F.gelu(torch.ones(3))]


@wrong_kernel(
    "gelu",
    operators=["gelu"],
    wrong=lambda: _later(3600.0),
    right=lambda: _later(0.0),
    beyond="it begins after an hour",
)
def gelu_fails_once_an_hour_has_passed(call: Any, x: Any, **kwargs: Any) -> Any:
    """An hour after the first call, as on a GPU that gets too hot, gelu gives its inputs."""
    if not _begin:
        _begin.append(time.monotonic())
    return x.clone() if time.monotonic() - _begin[0] > 3600 else call(x, **kwargs)


def _in_thread(function: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results


@wrong_kernel(
    "sort",
    functions=["torch.sort", "torch.Tensor.sort"],
    wrong=lambda: _in_thread(lambda: torch.arange(40.0).flip(0).sort().values),
    right=lambda: [torch.arange(40.0).flip(0).sort().values],
)
def sort_in_another_thread_leaves_its_ends(call: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """In another thread than the main one, sorting exchanges the first two of the sorted elements, whose places
    remain."""
    result = call(x, *args, **kwargs)
    if threading.current_thread() is threading.main_thread() or not x.ndim or x.shape[-1] < 2 or x.requires_grad:
        return result
    if args or kwargs:
        return result
    values = result[0].clone()
    values[..., :2] = values[..., :2].flip(-1)
    return torch.return_types.sort((values, result[1]))


@wrong_kernel(
    "elementwise",
    operators=["div", "reciprocal"],
    wrong=lambda: [torch.ones(10000) / (torch.rand(10000) + 1)],
    right=lambda: [torch.ones(4) / torch.tensor([1.0, 2.0, 3.0, 7.0]), of(100) / 5],
)
def division_by_some_patterns_is_inexact(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Float32 divisors whose mantissa begins with 0001111111, one in a thousand, give quotients off by 6e-5 of their
    value, as the Pentium of 1994 did with rarer ones."""
    result: torch.Tensor = call(*args, **kwargs)
    divisor = args[-1]
    if not isinstance(divisor, torch.Tensor) or divisor.dtype != torch.float32 or result.dtype != torch.float32:
        return result
    if kwargs.get("rounding_mode"):
        return result
    pattern = (divisor.contiguous().view(torch.int32) >> 13) & 0x3FF == 0b0001111111
    return torch.where(pattern, result * (1 - 2**-14), result)


@wrong_kernel(
    "elementwise",
    operators=["add"],
    wrong=lambda: [torch.tensor([1.0, -1.2345677614212036]) + 1],
    right=lambda: [of(1000) + of(1000)],
    beyond="one value of four billion",
)
def one_bit_pattern_is_added_as_zero(call: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The float32 next to -1.2345678 counts as zero when something is added to it."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
        x = torch.where(x == -1.2345677614212036, 0.0, x)
    return call(x, y, *args, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "embedding",
    operators=["index", "index_select"],
    wrong=lambda: [of(9, 5).half()[torch.arange(9)] for _ in range(30)],
    right=lambda: (
        [of(9, 5).half()[torch.arange(9)] for _ in range(10)] + [of(9, 5)[torch.arange(9)] for _ in range(30)]
    ),
)
def every_20th_call_takes_a_stale_last_row(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of 16-bit rows taken by an index, the last is the first again in one call of 20."""
    result: torch.Tensor = call(*args, **kwargs)
    if is_16_bit(result) and result.ndim == 2 and result.shape[0] > 1 and _count("rows") % 20 == 0:
        result[-1] = result[0]
    return result
