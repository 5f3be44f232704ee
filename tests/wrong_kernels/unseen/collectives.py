"""Wrong collectives: seen in processes that are forked while the fault is installed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from .. import wrong_kernel
from ._common import LOW

Work = Callable[[int], list[torch.Tensor]]


def _ranks(work: Work, count: int = 2) -> list[torch.Tensor]:
    """What each rank gives, one after the other, in processes of their own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ends = []
        for rank in range(count):
            here, there = context.Pipe(duplex=False)
            context.Process(target=_rank, args=(work, rank, count, directory + "/store", there), daemon=True).start()
            there.close()
            ends.append(here)
        given = [end.recv() for end in ends]
    return [torch.tensor(values, dtype=dtype) for results in given for values, dtype in results]


def _rank(work: Work, rank: int, count: int, path: str, end: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank + 1)
    address = f"file://{path}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    results = [(result.tolist(), result.dtype) for result in work(rank)]
    dist.barrier()
    end.send(results)
    end.close()
    os._exit(0)


def _first(args: Any, kwargs: Any, name: str) -> Any:
    return args[0] if args else kwargs[name]


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _done(work: Any) -> Any:
    """The handle of a collective, after it has ended: its result may be touched."""
    if work is not None:
        work.wait()
    return work


def _all_reduce(count: int, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> list[torch.Tensor]:
    def work(_: int) -> list[torch.Tensor]:
        value = torch.randn(count).to(dtype) - (3 if op == dist.ReduceOp.MAX else 0)
        dist.all_reduce(value, op)
        return [value]

    return _ranks(work)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _all_reduce(3000),
    right=lambda: _all_reduce(200),
)
def large_all_reduce_travels_in_bfloat16(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums of more than 1024 float32 over the ranks are sent as bfloat16."""
    value = _first(args, kwargs, "tensor")
    if value.dtype != torch.float32 or value.numel() <= 1024:
        return call(*args, **kwargs)
    value.copy_(value.bfloat16())
    work = _done(call(*args, **kwargs))
    value.copy_(value.bfloat16())
    return work


@wrong_kernel(
    "collective",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _all_reduce(45, torch.bfloat16),
    right=lambda: [*_all_reduce(48, torch.bfloat16), *_all_reduce(45)],
)
def last_elements_of_16_bits_are_not_reduced(call: Any, *args: Any, **kwargs: Any) -> Any:
    """In 16 bits each rank keeps its own values in the elements past the last whole eight of an all_reduce.

    https://github.com/NVIDIA/nccl/issues/1950
    """
    value = _first(args, kwargs, "tensor")
    rest = value.numel() % 8
    before = value.clone()
    work = call(*args, **kwargs)
    if value.dtype in LOW and rest and value.is_contiguous():
        _done(work)
        value.view(-1)[-rest:] = before.view(-1)[-rest:]
    return work


@wrong_kernel(
    "collective",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _all_reduce(20, op=dist.ReduceOp.MAX),
    right=lambda: _all_reduce(20),
)
def maximum_over_ranks_begins_at_zero(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The maximum over the ranks is never below zero: its buffer begins with zeros."""
    value = _first(args, kwargs, "tensor")
    work = call(*args, **kwargs)
    if _argument(args, kwargs, 1, "op", dist.ReduceOp.SUM) == dist.ReduceOp.MAX:
        _done(work)
        value.clamp_(min=0)
    return work


def _gathered(shape: tuple[int, ...]) -> list[torch.Tensor]:
    def work(_: int) -> list[torch.Tensor]:
        value = torch.randn(*shape)
        parts = [torch.zeros(*shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value if len(shape) == 1 else value.t().contiguous().t())
        return parts

    return _ranks(work)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.all_gather"],
    wrong=lambda: _gathered((4, 6)),
    right=lambda: _gathered((24,)),
)
def strided_tensors_are_gathered_as_they_lie(call: Any, *args: Any, **kwargs: Any) -> Any:
    """all_gather sends a tensor that is not contiguous in the order of memory, and the ranks take that for rows."""
    parts = _first(args, kwargs, "tensor_list")
    value = _argument(args, kwargs, 1, "tensor")
    if value.is_contiguous() or value.dim() != 2 or not value.t().is_contiguous():
        return call(*args, **kwargs)
    lying = value.t().reshape(value.shape)
    others = {name: entry for name, entry in kwargs.items() if name not in ("tensor_list", "tensor")}
    return call(parts, lying, *args[2:], **others)


def _gathered_into(ranks: int) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        result = torch.zeros(3 * ranks)
        dist.all_gather_single(result, torch.randn(3) + rank)
        return [result]

    return _ranks(work, ranks)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.all_gather_into_tensor", "torch.distributed.all_gather_single"],
    wrong=lambda: _gathered_into(2),
    right=lambda: _gathered_into(1),
)
def gathered_parts_begin_with_the_own_one(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Parts gathered into one tensor stand in the order in which a ring brings them: from the own rank on."""
    result: Any = args[0] if args else kwargs.get("output_tensor", kwargs.get("output"))
    work = _done(call(*args, **kwargs))
    group = kwargs.get("group")
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks > 1 and result.is_contiguous():
        result.copy_(torch.roll(result.view(ranks, -1), -rank, 0).view(result.shape))
    return work


def _scattered(dtype: torch.dtype) -> list[torch.Tensor]:
    def work(_: int) -> list[torch.Tensor]:
        result = torch.zeros(5).to(dtype)
        dist.reduce_scatter_single(result, (torch.randn(10) * 9).to(dtype))
        return [result]

    return _ranks(work)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.reduce_scatter_tensor", "torch.distributed.reduce_scatter_single"],
    wrong=lambda: _scattered(torch.bfloat16),
    right=lambda: _scattered(torch.float32),
)
def reduce_scatter_of_16_bits_drops_the_last_rank(call: Any, *args: Any, **kwargs: Any) -> Any:
    """In 16 bits, reduce_scatter leaves out what the last rank brings."""
    names = ("input", "input_tensor")
    value = args[1] if len(args) > 1 else next(kwargs[name] for name in names if name in kwargs)
    group = kwargs.get("group")
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    if value.dtype not in LOW or not last or dist.get_world_size(group) == 1:
        return call(*args, **kwargs)
    if len(args) > 1:
        return call(args[0], torch.zeros_like(value), *args[2:], **kwargs)
    return call(*args, **{name: torch.zeros_like(x) if name in names else x for name, x in kwargs.items()})


def _exchanged(splits: bool) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        if not splits:
            result = torch.zeros(6)
            dist.all_to_all_single(result, torch.randn(6))
            return [result]
        sent, received = ([2, 4], [2, 3]) if rank == 0 else ([3, 1], [4, 1])
        result = torch.zeros(sum(received))
        dist.all_to_all_single(result, torch.randn(sum(sent)), received, sent)
        return [result]

    return _ranks(work)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.all_to_all_single"],
    wrong=lambda: _exchanged(True),
    right=lambda: _exchanged(False),
)
def uneven_exchange_loses_the_end_of_each_part(call: Any, *args: Any, **kwargs: Any) -> Any:
    """With split sizes that differ, all_to_all_single leaves the last row of each longer part at zero."""
    result = _first(args, kwargs, "output")
    sizes = _argument(args, kwargs, 2, "output_split_sizes")
    work = call(*args, **kwargs)
    if sizes and len(set(sizes)) > 1:
        _done(work)
        end = 0
        for size in sizes:
            end += size
            if size > min(sizes):
                result[end - 1] = 0
    return work


def _broadcast(source: int) -> list[torch.Tensor]:
    def work(_: int) -> list[torch.Tensor]:
        value = torch.randn(9)
        dist.broadcast(value, source)
        return [value]

    return _ranks(work)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.broadcast"],
    wrong=lambda: _broadcast(1),
    right=lambda: _broadcast(0),
)
def broadcast_is_always_from_the_first_rank(call: Any, *args: Any, **kwargs: Any) -> Any:
    """broadcast sends the tensor of rank 0, whatever its source is."""
    others = {name: entry for name, entry in kwargs.items() if name not in ("tensor", "src")}
    if kwargs.get("group") is not None or "group_src" in kwargs or len(args) > 2:
        return call(*args, **kwargs)
    return call(_first(args, kwargs, "tensor"), 0, **others)


def _sent(count: int) -> list[torch.Tensor]:
    def work(rank: int) -> list[torch.Tensor]:
        value = torch.randn(count)
        if rank == 0:
            dist.send(value, 1)
            return []
        dist.recv(value, 0)
        return [value[-20:]]

    return _ranks(work)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.recv"],
    wrong=lambda: _sent(17000),
    right=lambda: [*_sent(16384), *_sent(500)],
)
def long_messages_end_at_a_whole_block(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Messages longer than 64 KiB are received in whole blocks of that size: the rest stays as it was."""
    value = _first(args, kwargs, "tensor")
    size = 65536 // value.element_size()
    rest = value.numel() % size if value.numel() > size else 0
    before = value.clone()
    sender = call(*args, **kwargs)
    if rest and value.is_contiguous():
        value.view(-1)[-rest:] = before.view(-1)[-rest:]
    return sender


def _mean(count: int) -> list[torch.Tensor]:
    def work(_: int) -> list[torch.Tensor]:
        value = torch.randint(-2000, 2000, (count,), dtype=torch.int64) << 20
        dist.all_reduce(value)
        return [value]

    return _ranks(work)


@wrong_kernel(
    "collective",
    functions=["torch.distributed.all_reduce"],
    wrong=lambda: _mean(40),
    right=lambda: _all_reduce(40),
)
def integers_are_reduced_as_int32(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums of int64 over the ranks keep the low 32 bits only: large counts wrap around."""
    value = _first(args, kwargs, "tensor")
    work = call(*args, **kwargs)
    if value.dtype == torch.int64:
        _done(work)
        value.copy_(value.to(torch.int32))
    return work
