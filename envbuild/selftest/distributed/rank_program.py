"""The program of one rank: join the process group, run collectives, measure bandwidth, train one step, leave.

Each rank runs this program in a separate process (rank_processes_and_faults.py). Every result must equal the expected
result exactly. All values are integers, and the dtype represents their sums exactly, so every order of summation gives
the same result. Each rank knows the expected results, because the inputs of all ranks are hashes of counters. The
values of a floating-point dtype below float64 need all its digits, so that a narrower intermediate result is detected.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from envbuild.selftest.harness.forked_work import Tell
from envbuild.selftest.harness.probe_context import dtype_name, short_name
from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.element_comparison import compare

# The stage's time limit ends a waiting rank. torch's own timeout, which also kills processes, must not expire earlier.
_PATIENCE = datetime.timedelta(minutes=30)
_PERIOD = 65537  # elements after which values repeat: not a power of two, so that a misplaced chunk is detected
_BEFORE = 3  # elements of the buffer before the first sent element, if the sent tensor is part of a buffer
_ROUNDS = 2  # rounds have different inputs, so that a result left over from the previous round is detected
# Numbers of elements. They are odd, because odd numbers of bf16 elements once led to misaligned addresses
# (pytorch#119345). With NCCL, there are sizes for each of its protocols: LL, LL128 and Simple.
_SMALL = 1001
_ODD = 4099  # not a multiple of 16 bytes in any dtype, and above 4096
_LARGE = 4 * 1024 * 1024 + 1
_ROWS, _COLUMNS = 32, 64  # output and input size of the trained layer
_DIGITS = {torch.float32: 24, torch.int32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits of the largest sum
# Sizes, in periods, of the tensors for which the bus bandwidth is measured. For 2-byte elements, the sizes over NCCL
# are about 16 MiB, 128 MiB and 1 GiB.
_PERIODS = {"nccl": (128, 1024, 8192), "gloo": (8,)}
_TIMED = 5  # number of timed calls
_PATIENT = 1.0  # seconds: a size is skipped if one call would take longer

# The keys under which a rank reports, and the reported values:
# STEP: number and name of the step that begins. DONE: true, after all steps. FIGURE + case: dtype, shape, error and
# seconds. WRONG + case: the step, and a sentence about the wrong result. RATE + step: GB/s. LEFT_OUT + step: the reason
# why the rest of the step was left out.
STEP, DONE, FIGURE, WRONG, RATE, LEFT_OUT = "step", "done", "figure ", "wrong ", "rate ", "left out "
# Parts of torch's errors for a collective that a backend does not have, or not for the dtype.
_REFUSALS = ("does not support", "not implemented", "Invalid scalar type")


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank in its world.

    `rank`: its number. `size`: the number of ranks. `device`: its device. `meeting`: the URL through which the ranks
    find each other (init_method).
    """

    backend: str
    rank: int
    size: int
    device: torch.device
    meeting: str

    @property
    def moved(self) -> torch.device:
        """The device of the exchanged tensors. For gloo, it is the CPU, because no torch version supports all
        collectives of gloo for GPU tensors."""
        return self.device if self.backend == "nccl" else torch.device("cpu")


class Rank:
    """Runs the steps of one rank. It reports the start of each step, its figures and its wrong results."""

    def __init__(self, place: RankPlace, tell: Tell) -> None:
        self.place = place
        self._tell = tell
        self._step = ""
        self._count = 0

    def run(self) -> None:
        """Run all steps. An exception of torch ends the run; a wrong result does not."""
        self._begin("init")
        self._join()
        for size, dtype in self._reductions():
            self._each("all_reduce", self._all_reduce, size, dtype)
        for name, work in (
            ("all_gather", self._all_gather),
            ("broadcast", self._broadcast),
            ("reduce_scatter", self._reduce_scatter),
            ("all_to_all", self._all_to_all),
            ("send_recv", self._send_receive),
        ):
            self._each(name, work, _SMALL, torch.float32)
            self._each(name, work, _ODD, torch.bfloat16)
        self._each("all_reduce max", self._all_reduce_max, _ODD, torch.float32)
        for how in ("minimum", "product"):
            self._each(f"all_reduce {how}", functools.partial(self._all_reduce_signed, how=how), _ODD, torch.float32)
        for name, work in (
            ("reduce", self._reduce),
            ("all_gather_into_tensor", self._all_gather_into_tensor),
            ("two all_reduce at a time", self._two_at_a_time),
            ("all_reduce turned", self._all_reduce_turned),
        ):
            self._each(name, work, _SMALL, torch.float32)
            self._each(name, work, _ODD, torch.float16)
        for name, work in (("broadcast", self._broadcast), ("all_gather", self._all_gather)):
            for dtype in (torch.int64, torch.uint8, torch.float64):
                self._each(name, work, _ODD, dtype)
        if self.place.backend == "gloo":  # NCCL's gather and scatter of lists of tensors do not exist in every release
            self._each("gather and scatter", self._gather_and_scatter, _SMALL, torch.float32)
            self._each("gather and scatter", self._gather_and_scatter, _ODD, torch.bfloat16)
        self._each("all_to_all uneven", self._all_to_all_uneven, _SMALL, torch.float32)
        for dtype in (torch.float16, torch.bfloat16) if self.place.size > 1 else ():
            with self._may_be_refused():
                self._measure(dtype)
        self._begin("ddp")
        self._train()
        self._begin("leave")
        dist.destroy_process_group()
        self._tell(DONE, True)

    def _reductions(self) -> list[tuple[int, torch.dtype]]:
        dtypes = (torch.float32, torch.int32, torch.float16, torch.bfloat16)
        sizes = [*((_SMALL, dtype) for dtype in dtypes), (_PERIOD, torch.float32), (_SMALL, torch.int64)]
        return sizes if self.place.backend != "nccl" else [*sizes, (_LARGE, torch.float32)]

    def _begin(self, step: str) -> None:
        self._step = step
        self._count += 1
        self._tell(STEP, [self._count, step])

    def _each(self, name: str, work: Callable[[int, int, torch.dtype], None], size: int, dtype: torch.dtype) -> None:
        self._begin(f"{name} {short_name(dtype)} {size}")
        with self._may_be_refused():
            for turn in range(_ROUNDS):
                work(turn, size, dtype)

    @contextlib.contextmanager
    def _may_be_refused(self) -> Iterator[None]:
        """Skip a collective if torch reports that the backend does not support it. All ranks then skip it, because all
        get the same error."""
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            self._leave_out(str(error).splitlines()[0][:200])

    def _leave_out(self, reason: str) -> None:
        self._tell(LEFT_OUT + self._step, reason)

    def _join(self) -> None:
        """Create the process group, and run a barrier. NCCL creates its communicator in this first collective."""
        place = self.place
        dist.init_process_group(
            place.backend,
            init_method=place.meeting,
            rank=place.rank,
            world_size=place.size,
            timeout=_PATIENCE,
        )
        if place.backend == "nccl":
            dist.barrier(device_ids=[place.device.index])
        else:
            dist.barrier()

    def _given(self, turn: int, rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the input of a rank, on the host.

        The input consists of whole numbers. They are as large as possible while their sum over all ranks has at most
        the number of bits in _DIGITS. The dtype represents such sums exactly. The default is 24 bits. For
        int64, they are up to about 2^40, so that float64, in which results are compared, represents their sum.
        uint8 inputs are below 251 and are not summed.
        """
        if dtype == torch.int64:
            high, low = _values(turn, rank, size, 1 << 20), _values(turn + _ROUNDS, rank, size, 1 << 20)
            return high.to(torch.float64) * 2.0**20 + low
        digits = _DIGITS.get(dtype, 24)
        values = _values(turn, rank, size, max(1, (1 << digits) // self.place.size))
        return values.abs() % 251 if dtype == torch.uint8 else values

    def _all_reduce(self, turn: int, size: int, dtype: torch.dtype) -> None:
        values = self._sent(turn, self._given(turn, self.place.rank, size, dtype), dtype)
        seconds = self._timed(lambda: dist.all_reduce(values))
        self._check(self._step, values, self._sum(turn, size, dtype), seconds)

    def _all_reduce_max(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Compute the maximum of negative numbers. An element that the library leaves at 0 exceeds the right result."""
        given = [-self._given(turn, rank, size, dtype).abs() for rank in range(self.place.size)]
        values = self._sent(turn, given[self.place.rank], dtype)
        seconds = self._timed(lambda: dist.all_reduce(values, dist.ReduceOp.MAX))
        self._check(self._step, values, functools.reduce(torch.maximum, given), seconds)

    def _all_reduce_signed(self, turn: int, size: int, dtype: torch.dtype, how: str) -> None:
        """Compute the minimum of positive numbers, or the product of signs (1 and -1)."""
        given = [self._given(turn, rank, size, dtype) for rank in range(self.place.size)]
        given = [values.abs() if how == "minimum" else values.sign() for values in given]
        values = self._sent(turn, given[self.place.rank], dtype)
        operation = dist.ReduceOp.MIN if how == "minimum" else dist.ReduceOp.PRODUCT
        # Computed before the call, because the call may overwrite the input of this rank.
        expected = functools.reduce(torch.minimum if how == "minimum" else torch.mul, given)
        seconds = self._timed(lambda: dist.all_reduce(values, operation))
        self._check(self._step, values, expected, seconds)

    def _reduce(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Reduce to each rank in turn, and check the sum there."""
        for target in range(self.place.size):
            values = self._sent(turn, self._given(turn, self.place.rank, size, dtype), dtype)
            seconds = self._timed(functools.partial(dist.reduce, values, target))
            if target == self.place.rank:
                self._check(self._step, values, self._sum(turn, size, dtype), seconds)

    def _all_gather_into_tensor(self, turn: int, size: int, dtype: torch.dtype) -> None:
        given = [self._given(turn, rank, size, dtype) for rank in range(self.place.size)]
        values = self._sent(turn, given[self.place.rank], dtype)
        gathered = values.new_zeros(size * self.place.size)
        seconds = self._timed(lambda: dist.all_gather_into_tensor(gathered, values))
        self._check(self._step, gathered, torch.cat(given), seconds)

    def _two_at_a_time(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Run two sums, of which the second begins before the first has ended."""
        turns = (turn, turn + _ROUNDS)
        sent = [self._sent(turn, self._given(each, self.place.rank, size, dtype), dtype) for each in turns]

        def both() -> None:
            for work in [dist.all_reduce(values, async_op=True) for values in sent]:
                work.wait()

        seconds = self._timed(both)
        for each, values in zip(turns, sent):
            self._check(self._step, values, self._sum(each, size, dtype), seconds)

    def _all_reduce_turned(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Sum images in channels-last layout, the only memory layout except contiguous that torch accepts for NCCL."""
        image = (1, 7, size, 1)
        values = self._given(turn, self.place.rank, math.prod(image), dtype).view(image)
        sent = self._sent(turn, values.movedim(1, -1).reshape(-1), dtype).view(1, size, 1, 7).movedim(-1, 1)
        seconds = self._timed(lambda: dist.all_reduce(sent))
        self._check(self._step, sent, self._sum(turn, math.prod(image), dtype).view(image), seconds)

    def _gather_and_scatter(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Each rank in turn gathers the inputs of all ranks, and then scatters them back."""
        place = self.place
        given = [self._given(turn, rank, size, dtype) for rank in range(place.size)]
        for root in range(place.size):
            values = self._sent(turn, given[place.rank], dtype)
            gathered = [torch.zeros_like(values) for _ in given] if place.rank == root else None
            seconds = self._timed(functools.partial(dist.gather, values, gathered, root))
            if gathered is not None:
                self._check(f"{self._step}: gather", torch.stack(gathered), torch.stack(given), seconds)
            parts = [self._sent(turn, part, dtype) for part in given] if place.rank == root else None
            received = torch.zeros_like(values)
            seconds = self._timed(functools.partial(dist.scatter, received, parts, root))
            self._check(f"{self._step}: scatter", received, given[place.rank], seconds)

    def _sent(self, turn: int, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that a rank sends. In rounds with odd numbers, it is part of a buffer, at an odd offset."""
        sent = values.to(self.place.moved, dtype)
        if turn % 2 == 0:
            return sent
        return torch.cat((sent[:_BEFORE].neg(), sent, sent[:1]))[_BEFORE : _BEFORE + len(sent)]

    def _sum(self, turn: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of the inputs of all ranks, in float64 on the host."""
        total = torch.zeros(size, dtype=torch.float64)
        for rank in range(self.place.size):
            total += self._given(turn, rank, size, dtype)
        return total

    def _all_gather(self, turn: int, size: int, dtype: torch.dtype) -> None:
        given = [self._given(turn, rank, size, dtype) for rank in range(self.place.size)]
        values = self._sent(turn, given[self.place.rank], dtype)
        gathered = [torch.zeros_like(values) for _ in given]
        seconds = self._timed(lambda: dist.all_gather(gathered, values))
        self._check(self._step, torch.stack(gathered), torch.stack(given), seconds)

    def _broadcast(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Broadcast from each rank in turn."""
        for source in range(self.place.size):
            expected = self._given(turn, source, size, dtype)
            sent = self._sent(turn, expected if source == self.place.rank else torch.zeros(size), dtype)
            seconds = self._timed(functools.partial(dist.broadcast, sent, source))
            self._check(self._step, sent, expected, seconds)

    def _reduce_scatter(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Run reduce_scatter: each rank receives its own part of the sum, which has `size` elements."""
        place = self.place
        values = self._sent(turn, self._given(turn, place.rank, size * place.size, dtype), dtype)
        part = values.new_zeros(size)
        seconds = self._timed(lambda: dist.reduce_scatter_tensor(part, values))
        self._check(
            self._step, part, self._sum(turn, size * place.size, dtype).view(place.size, size)[place.rank], seconds
        )

    def _all_to_all(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Run all_to_all: every rank sends `size` elements to every rank."""
        place = self.place
        given = [self._given(turn, rank, size * place.size, dtype) for rank in range(place.size)]
        values = self._sent(turn, given[place.rank], dtype)
        received = torch.zeros_like(values)
        seconds = self._timed(lambda: dist.all_to_all_single(received, values))
        self._check(
            self._step, received, torch.cat([part.view(place.size, size)[place.rank] for part in given]), seconds
        )

    def _all_to_all_uneven(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Run all_to_all with parts of different lengths: `size` plus the numbers of the sending and receiving rank."""
        place, ranks = self.place, range(self.place.size)
        lengths = [[size + to + sender for to in ranks] for sender in ranks]
        given = [self._given(turn, rank, sum(lengths[rank]), dtype) for rank in ranks]
        values = self._sent(turn, given[place.rank], dtype)
        takes = [lengths[sender][place.rank] for sender in ranks]
        received = values.new_zeros(sum(takes))
        seconds = self._timed(lambda: dist.all_to_all_single(received, values, takes, lengths[place.rank]))
        parts = [torch.split(part, lengths[sender])[place.rank] for sender, part in enumerate(given)]
        self._check(self._step, received, torch.cat(parts), seconds)

    def _send_receive(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Send to the next rank and receive from the previous rank, in a ring. With a single rank, do nothing."""
        place = self.place
        if place.size == 1:
            return
        before, after = ((place.rank + step) % place.size for step in (-1, 1))
        values = self._sent(turn, self._given(turn, place.rank, size, dtype), dtype)
        received = torch.zeros_like(values)

        def ring() -> None:
            if turn % 2:  # blocking calls: even ranks send first, odd ranks receive first
                for works in (dist.send, dist.recv) if place.rank % 2 == 0 else (dist.recv, dist.send):
                    works(values if works is dist.send else received, after if works is dist.send else before)
                return
            both = dist.P2POp(dist.isend, values, after), dist.P2POp(dist.irecv, received, before)
            for work in dist.batch_isend_irecv(list(both)):
                work.wait()

        seconds = self._timed(ring)
        self._check(self._step, received, self._given(turn, before, size, dtype), seconds)

    def _measure(self, dtype: torch.dtype) -> None:
        """Measure the bus bandwidth of all_reduce for tensors of increasing size, and check each result.

        With n ranks, the bus bandwidth is 2 (n - 1) / n times the bytes divided by the seconds (nccl-tests,
        doc/PERFORMANCE.md). Whether the next size is run depends on the smallest free memory and the longest time of
        all ranks, so all ranks decide the same. The whole result is checked on the device, and the first wrong period
        is compared on the host.
        """
        place, rate = self.place, math.inf
        given, expected = self._given(0, place.rank, _PERIOD, dtype), self._sum(0, _PERIOD, dtype)
        for periods in _PERIODS[place.backend]:
            step = f"all_reduce {short_name(dtype)} {periods * _PERIOD}"
            self._begin(step)
            volume = periods * _PERIOD * torch.finfo(dtype).bits // 8
            if self._agreed(_free(place.moved), dist.ReduceOp.MIN) < 3 * volume:
                return self._leave_out("too little memory is free")
            if volume > rate * _PATIENT:
                return self._leave_out(f"one call would take more than {_PATIENT:g} s")
            values = given.to(place.moved, dtype).repeat(periods, 1)
            seconds = self._timed(functools.partial(dist.all_reduce, values))
            different = (values != expected.to(place.moved, dtype)).any(dim=1).to(torch.uint8)
            self._check(step, values[int(different.argmax())], expected, seconds)
            values.zero_()  # because repeated sums of nonzero values would exceed the range of the dtype
            spent = sum(self._timed(functools.partial(dist.all_reduce, values)) for _ in range(_TIMED))
            rate = volume * _TIMED / self._agreed(spent, dist.ReduceOp.MAX)
            self._tell(RATE + step, 2 * (place.size - 1) / place.size * rate / 1e9)

    def _agreed(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        """Return the minimum or maximum of the values of all ranks. The result is identical on each rank."""
        shared = torch.tensor([value], dtype=torch.float64, device=self.place.moved)
        dist.all_reduce(shared, how)
        return float(shared)

    def _train(self) -> None:
        """Run the forward and backward pass of a layer under DistributedDataParallel, and compare parameters and
        gradients with those that this rank computes alone from the samples of all ranks.

        DDP multiplies each gradient by 1 / size before it sums. Because the loss is multiplied by `size` and each rank
        has one sample, each gradient is 0 or ±size before DDP's multiplication, and 0 or ±1 after it. Therefore the
        sums are exact for every size.
        """
        place = self.place
        layer, single = _layer(place.rank).to(place.device), _layer(0)
        ids = [place.device.index] if place.device.type == "cuda" else None
        x, target = (values.to(place.device) for values in _sample(place.rank))

        def step() -> None:
            wrapped = DistributedDataParallel(layer, device_ids=ids)
            ((wrapped(x) * target).sum() * place.size).backward()

        seconds = self._timed(step)
        samples = [_sample(rank) for rank in range(place.size)]
        whole, targets = (torch.cat(parts) for parts in zip(*samples))
        (single(whole) * targets).sum().backward()
        for (name, got), wanted in zip(layer.named_parameters(), single.parameters()):
            self._check(f"ddp {name}", got, wanted.detach(), seconds)
            assert got.grad is not None and wanted.grad is not None, f"no gradient of {name}"
            self._check(f"ddp gradient of {name}", got.grad, wanted.grad, seconds)

    def _timed(self, work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)
        return time.perf_counter() - begin

    def _check(self, case: str, got: torch.Tensor, expected: torch.Tensor, seconds: float) -> None:
        worst = compare(got, expected)
        self._tell(f"{FIGURE}{case}", [dtype_name(got.dtype), list(got.shape), worst.error, seconds])
        if worst.wrong:
            self._tell(f"{WRONG}{case}", [self._step, f"{case}: {worst}"])


def _values(turn: int, rank: int, size: int, most: int) -> torch.Tensor:
    """Return whole numbers in float32 from ±1 to ±`most`. They differ between ranks and between rounds (`turn`)."""
    repeats = -(-size // _PERIOD)
    return hashed_inputs.whole((min(size, _PERIOD),), 1000 * (turn + 1) + rank, most).repeat(repeats)[:size]


def _free(device: torch.device) -> float:
    """Return the free GPU memory in bytes. For the CPU, return a huge number, because little host memory is needed."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float(1 << 62)


def _layer(rank: int) -> torch.nn.Linear:
    """Return a layer whose weights differ between ranks. DDP must replace these weights by those of rank 0."""
    layer = torch.nn.Linear(_COLUMNS, _ROWS)
    with torch.no_grad():
        layer.weight.copy_(hashed_inputs.ternary((_ROWS, _COLUMNS), seed=500 + rank))
        layer.bias.copy_(hashed_inputs.ternary((_ROWS,), seed=600 + rank))
    return layer


def _sample(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the only sample of a rank and its target, with values in {-1, 0, 1}."""
    return hashed_inputs.ternary((1, _COLUMNS), seed=700 + rank, every=2), hashed_inputs.ternary(
        (1, _ROWS), seed=800 + rank, every=2
    )
