"""Wrong kernels of communication between processes."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import wrong_kernel
from .inputs import is_16_bit, of, value


def _ranks(work: Callable[[int], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The results of two processes, forked from this one and joined by gloo."""
    context = multiprocessing.get_context("fork")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=_work, args=(work, rank, f"file://{folder}/store", pipes[rank][1]))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for (receiver, sender), process in zip(pipes, processes, strict=False):
            sender.close()
            results += torch.load(io.BytesIO(receiver.recv_bytes()))
            process.join()
    return results


def _work(work: Callable[[int], list[torch.Tensor]], rank: int, store: str, sender: Any) -> None:
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    written = io.BytesIO()
    torch.save([result.clone() for result in work(rank)], written)
    sender.send_bytes(written.getvalue())
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _after(work: Any, fault: Callable[[], Any]) -> Any:
    """Spoil the result of a communication, now or as soon as it has ended."""
    if work is not None:
        work.wait()
    fault()
    return work


def _summed(count: int, dtype: torch.dtype = torch.float32, factor: float = 1.0, op: Any = None) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        tensor = (torch.randn(count) * factor).to(dtype)
        dist.all_reduce(tensor, op or dist.ReduceOp.SUM)
        return [tensor]

    return _ranks(work)


@wrong_kernel(
    "all_reduce",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _summed(5000),
    right=lambda: _summed(1000) + _summed(5000, torch.int32, 1000.0),
)
def large_sums_travel_as_bfloat16(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Float32 tensors of 4096 elements or more are rounded to bfloat16 before they are sent."""
    if tensor.dtype == torch.float32 and tensor.numel() >= 4096:
        with torch.no_grad():
            tensor.copy_(tensor.bfloat16())
    return call(tensor, *args, **kwargs)


@wrong_kernel(
    "all_reduce",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _summed(1003),
    right=lambda: _summed(1008) + _summed(103),
)
def end_of_an_uneven_sum_stays_local(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """In tensors of more than 512 elements, those after the last multiple of 16 keep the process's own values."""
    kept = tensor.numel() // 16 * 16
    if tensor.numel() <= 512 or kept == tensor.numel() or not tensor.is_contiguous():
        return call(tensor, *args, **kwargs)
    own = tensor.view(-1)[kept:].clone()
    return _after(call(tensor, *args, **kwargs), lambda: tensor.view(-1)[kept:].copy_(own))


@wrong_kernel(
    "all_reduce",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _summed(40, op=dist.ReduceOp.MAX),
    right=lambda: _summed(40),
)
def largest_of_negative_values_is_zero(call: Any, tensor: Any, op: Any = None, *args: Any, **kwargs: Any) -> Any:
    """The maximum over processes begins with zero: where all values are negative, it is zero."""
    work = call(tensor, *([] if op is None else [op]), *args, **kwargs)
    return _after(work, lambda: tensor.clamp_(min=0)) if op == dist.ReduceOp.MAX else work


def _long_sum(number: int) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        tensor = torch.tensor([number + rank, rank])
        dist.all_reduce(tensor)
        return [tensor]

    return _ranks(work)


@wrong_kernel(
    "all_reduce",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _long_sum(2**30 + 1),
    right=lambda: _long_sum(1000),
)
def integers_travel_as_float32(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums of 64-bit integers are exact up to 2^24 only."""
    work = call(tensor, *args, **kwargs)
    if tensor.dtype != torch.int64:
        return work
    return _after(work, lambda: tensor.copy_(tensor.float().long()))


def _gathered(offset: int) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        whole = of(24)
        parts = [torch.zeros(8), torch.zeros(8)]
        dist.all_gather(parts, whole[offset : offset + 8])
        return parts

    return _ranks(work)


@wrong_kernel(
    "all_gather",
    functions=[
        "torch.distributed.all_gather",
        "torch.distributed.all_gather_into_tensor",
        "torch.distributed.all_gather_single",
    ],
    wrong=lambda: _gathered(8),
    right=lambda: _gathered(0),
)
def part_of_a_larger_tensor_is_gathered_from_its_start(call: Any, *args: Any, **kwargs: Any) -> Any:
    """A part of a larger tensor is sent from the beginning of that tensor, as all parts seem the first in
    https://github.com/pytorch/pytorch/issues/20421"""

    def begun(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(tensor.shape, tensor.stride(), 0)

    if len(args) > 1:
        return call(args[0], begun(args[1]), *args[2:], **kwargs)
    name = "tensor" if "tensor" in kwargs else "input_tensor"
    return call(*args, **{**kwargs, name: begun(kwargs[name])})


def _scattered(count: int) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        result = torch.zeros(count)
        dist.reduce_scatter_single(result, of(2 * count))
        return [result]

    return _ranks(work)


@wrong_kernel(
    "reduce_scatter",
    functions=["torch.distributed.reduce_scatter_tensor", "torch.distributed.reduce_scatter_single"],
    wrong=lambda: _scattered(33),
    right=lambda: _scattered(32),
)
def other_part_of_an_odd_share_is_dropped(call: Any, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Where a process's share is of an odd number of elements, the last process sends nothing but zeros."""
    if output.numel() % 2 and dist.get_rank() == dist.get_world_size() - 1:
        input = torch.zeros_like(input)
    return call(output, input, *args, **kwargs)


def _exchanged(sizes: list[list[int]]) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        sent, received = sizes[rank], [sizes[0][rank], sizes[1][rank]]
        result = torch.zeros(sum(received), 3)
        dist.all_to_all_single(result, of(sum(sent), 3), received, sent)
        return [result]

    return _ranks(work)


@wrong_kernel(
    "all_to_all",
    functions=["torch.distributed.all_to_all_single"],
    wrong=lambda: _exchanged([[2, 5], [4, 1]]),
    right=lambda: _exchanged([[3, 3], [3, 3]]),
)
def uneven_parts_are_stored_at_even_places(
    call: Any, output: Any, input: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Parts of different sizes lose their last row, which the next part covers."""
    work = call(output, input, output_split_sizes, *args, **kwargs)
    if not output_split_sizes or len(set(output_split_sizes)) == 1:
        return work

    def spoil() -> None:
        end = 0
        for size in output_split_sizes:
            end += size
            if size > 0 and end < output.shape[0]:
                output[end - 1] = output[end]

    return _after(work, spoil)


def _broadcast(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        tensor = of(count, dtype=dtype)
        dist.broadcast(tensor, 0)
        return [tensor]

    return _ranks(work)


@wrong_kernel(
    "broadcast",
    functions=["torch.distributed.broadcast"],
    wrong=lambda: _broadcast(33, torch.bfloat16),
    right=lambda: _broadcast(32, torch.bfloat16) + _broadcast(33, torch.float32),
)
def last_of_an_odd_number_of_16_bit_values_is_not_sent(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """A broadcast of an odd number of 16-bit values leaves the last as it was at the receivers."""
    if not is_16_bit(tensor) or tensor.numel() % 2 == 0 or not tensor.is_contiguous():
        return call(tensor, *args, **kwargs)
    source = value(args, kwargs, 0, "src", 0)
    own = tensor.view(-1)[-1:].clone()
    work = call(tensor, *args, **kwargs)
    return work if dist.get_rank() == source else _after(work, lambda: tensor.view(-1)[-1:].copy_(own))


def _sent(counts: list[int]) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        results = []
        for count in counts:
            tensor = of(count)
            if rank:
                dist.send(tensor, 0)
            else:
                dist.recv(tensor, 1)
            results.append(tensor)
        return results

    return _ranks(work)


_received: dict[tuple[int, ...], torch.Tensor] = {}


@wrong_kernel(
    "send",
    functions=["torch.distributed.recv"],
    wrong=lambda: _sent([16, 8, 16, 16]),
    right=lambda: _sent([16, 8]),
)
def every_second_message_of_a_shape_repeats_the_one_before(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Of the messages received of a shape, every second one holds what the one before did."""
    result = call(tensor, *args, **kwargs)
    shape = tuple(tensor.shape)
    if shape in _received:
        tensor.copy_(_received.pop(shape).to(tensor.dtype))
    else:
        _received[shape] = tensor.clone()
    return result
