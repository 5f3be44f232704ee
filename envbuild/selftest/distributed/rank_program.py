"""The steps of one rank: join, exchange, measure, train, leave. Every result is checked exactly.

Runs in a separate process (rank_processes_and_faults.py). All values are integers whose sums fit the dtype, so every
order of summation gives the same result, which the host knows: the inputs of every rank come from counters. The values
need all digits of the dtype, so that intermediate results in a narrower dtype are detected.
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

# A waiting rank is ended by its stage's time limit; torch's own timeout, which kills processes, must not come first.
_PATIENCE = datetime.timedelta(minutes=30)
_PERIOD = 65537  # elements: not a power of two, so that a chunk in the wrong position is detected
_BEFORE = 3  # elements before the sent ones in the buffer
_ROUNDS = 2  # with different inputs, so that a result left over from the previous round is detected
# Numbers of elements: odd (with odd numbers of bf16 elements, addresses were misaligned, pytorch#119345); with a GPU
# also sizes for each of NCCL's protocols: LL, LL128, Simple.
_SMALL = 1001
_ODD = 4099  # past multiples of 16 bytes in every dtype, and past 4096
_LARGE = 4 * 1024 * 1024 + 1
_ROWS, _COLUMNS = 32, 64  # of the trained layer
_DIGITS = {torch.float32: 24, torch.int32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits of an integer
# Number of periods of the tensors whose bus bandwidth is measured: with 2 bytes an element 16 MiB, 128 MiB and 1 GiB
# over NCCL.
_PERIODS = {"nccl": (128, 1024, 8192), "gloo": (8,)}
_TIMED = 5  # calls
_PATIENT = 1.0  # seconds: larger sizes are skipped if one call would take longer

# The keys under which a rank reports. STEP: number and name of the step that begins. DONE: all steps are done.
# FIGURE + case: dtype, shape, error and seconds. WRONG + case: the step and a sentence. RATE + step: GB/s.
# LEFT_OUT + step: why it was left out.
STEP, DONE, FIGURE, WRONG, RATE, LEFT_OUT = "step", "done", "figure ", "wrong ", "rate ", "left out "
# torch's messages if a backend lacks a collective, or lacks it for this dtype
_REFUSALS = ("does not support", "not implemented", "Invalid scalar type")


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank: its number among `size`, its device, and the URL at which the ranks meet."""

    backend: str
    rank: int
    size: int
    device: torch.device
    meeting: str

    @property
    def moved(self) -> torch.device:
        """The device of the exchanged tensors: the host for gloo, because no torch has all of gloo for GPU tensors."""
        return self.device if self.backend == "nccl" else torch.device("cpu")


class Rank:
    """Runs the steps of one rank; reports the start, the figures and the first error of each step."""

    def __init__(self, place: RankPlace, tell: Tell) -> None:
        self.place = place
        self._tell = tell
        self._step = ""
        self._count = 0

    def run(self) -> None:
        """Run all steps. An exception of torch ends the run; after a wrong result, the next step still runs."""
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
        if self.place.backend == "gloo":  # not every NCCL release has gather and scatter for lists of tensors
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
        """Skip a collective that the backend lacks; all ranks get the same error."""
        try:
            yield
        except RuntimeError as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            self._leave_out(str(error).splitlines()[0][:200])

    def _leave_out(self, reason: str) -> None:
        self._tell(LEFT_OUT + self._step, reason)

    def _join(self) -> None:
        """Create the process group. A barrier, as the first collective, also creates NCCL's communicator."""
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
        """The input of a rank, on the host.

        Whole numbers that are as large as possible while the sum of all ranks fits the dtype; for int64 it fits
        float64, in which results are compared.
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
        """The maximum of negative numbers, so that an unwritten element of a zeroed buffer is detected."""
        given = [-self._given(turn, rank, size, dtype).abs() for rank in range(self.place.size)]
        values = self._sent(turn, given[self.place.rank], dtype)
        seconds = self._timed(lambda: dist.all_reduce(values, dist.ReduceOp.MAX))
        self._check(self._step, values, functools.reduce(torch.maximum, given), seconds)

    def _all_reduce_signed(self, turn: int, size: int, dtype: torch.dtype, how: str) -> None:
        """The minimum of numbers above 0, or the product of signs."""
        given = [self._given(turn, rank, size, dtype) for rank in range(self.place.size)]
        given = [values.abs() if how == "minimum" else values.sign() for values in given]
        values = self._sent(turn, given[self.place.rank], dtype)
        operation = dist.ReduceOp.MIN if how == "minimum" else dist.ReduceOp.PRODUCT
        # Before the call, which may overwrite a rank's input.
        expected = functools.reduce(torch.minimum if how == "minimum" else torch.mul, given)
        seconds = self._timed(lambda: dist.all_reduce(values, operation))
        self._check(self._step, values, expected, seconds)

    def _reduce(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """The sum on each rank, one after the other."""
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
        """Two sums, the second of which begins before the first has ended."""
        turns = (turn, turn + _ROUNDS)
        sent = [self._sent(turn, self._given(each, self.place.rank, size, dtype), dtype) for each in turns]

        def both() -> None:
            for work in [dist.all_reduce(values, async_op=True) for values in sent]:
                work.wait()

        seconds = self._timed(both)
        for each, values in zip(turns, sent):
            self._check(self._step, values, self._sum(each, size, dtype), seconds)

    def _all_reduce_turned(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """The sum of images that are stored channels last, the only other order of memory that NCCL's calls take."""
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
        """The tensor that a rank sends: every second time a part of a larger tensor, at an odd offset."""
        sent = values.to(self.place.moved, dtype)
        if turn % 2 == 0:
            return sent
        return torch.cat((sent[:_BEFORE].neg(), sent, sent[:1]))[_BEFORE : _BEFORE + len(sent)]

    def _sum(self, turn: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The sum of all ranks' inputs, in float64 on the host."""
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
        """Broadcast from each rank, one after the other."""
        for source in range(self.place.size):
            expected = self._given(turn, source, size, dtype)
            sent = self._sent(turn, expected if source == self.place.rank else torch.zeros(size), dtype)
            seconds = self._timed(functools.partial(dist.broadcast, sent, source))
            self._check(self._step, sent, expected, seconds)

    def _reduce_scatter(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """Each rank receives its own part of the sum, `size` elements."""
        place = self.place
        values = self._sent(turn, self._given(turn, place.rank, size * place.size, dtype), dtype)
        part = values.new_zeros(size)
        seconds = self._timed(lambda: dist.reduce_scatter_tensor(part, values))
        self._check(
            self._step, part, self._sum(turn, size * place.size, dtype).view(place.size, size)[place.rank], seconds
        )

    def _all_to_all(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """All-to-all: every rank sends `size` elements to every rank."""
        place = self.place
        given = [self._given(turn, rank, size * place.size, dtype) for rank in range(place.size)]
        values = self._sent(turn, given[place.rank], dtype)
        received = torch.zeros_like(values)
        seconds = self._timed(lambda: dist.all_to_all_single(received, values))
        self._check(
            self._step, received, torch.cat([part.view(place.size, size)[place.rank] for part in given]), seconds
        )

    def _all_to_all_uneven(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """all_to_all with parts of different lengths: `size` plus the sender's and the receiver's rank number."""
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
        """Send to the next rank and receive from the previous one, in a ring; nothing in a world of one."""
        place = self.place
        if place.size == 1:
            return
        before, after = ((place.rank + step) % place.size for step in (-1, 1))
        values = self._sent(turn, self._given(turn, place.rank, size, dtype), dtype)
        received = torch.zeros_like(values)

        def ring() -> None:
            if turn % 2:  # one after the other: those with odd numbers receive first
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

        The bandwidth is 2 (n - 1) / n times the bytes over the seconds (nccl-tests, doc/PERFORMANCE.md). The least free
        memory and the longest time of all ranks decide whether the next size is run, so all ranks decide the same. Only
        the first wrong period is compared on the host.
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
            values.zero_()  # further sums would exceed the dtype's range
            spent = sum(self._timed(functools.partial(dist.all_reduce, values)) for _ in range(_TIMED))
            rate = volume * _TIMED / self._agreed(spent, dist.ReduceOp.MAX)
            self._tell(RATE + step, 2 * (place.size - 1) / place.size * rate / 1e9)

    def _agreed(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        """The minimum or maximum of all ranks' values, identical on each rank."""
        shared = torch.tensor([value], dtype=torch.float64, device=self.place.moved)
        dist.all_reduce(shared, how)
        return float(shared)

    def _train(self) -> None:
        """Run one step of a layer under DistributedDataParallel, and compare it with one process that has all ranks'
        samples.

        DDP multiplies each gradient by 1 / size before it sums. With losses multiplied by `size` and one sample for
        each rank, each gradient is 0 or ±size before DDP's multiplication and 0 or ±1 after it. The sums are therefore
        exact in any dtype, for every size.
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
    """float32 integers from ±1 to ±`most`, different for each rank and turn."""
    repeats = -(-size // _PERIOD)
    return hashed_inputs.whole((min(size, _PERIOD),), 1000 * (turn + 1) + rank, most).repeat(repeats)[:size]


def _free(device: torch.device) -> float:
    """Free bytes of GPU memory; the host's memory is not checked, because little of it is used."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float(1 << 62)


def _layer(rank: int) -> torch.nn.Linear:
    """A layer with different weights on each rank: DDP replaces them by those of the first rank."""
    layer = torch.nn.Linear(_COLUMNS, _ROWS)
    with torch.no_grad():
        layer.weight.copy_(hashed_inputs.ternary((_ROWS, _COLUMNS), seed=500 + rank))
        layer.bias.copy_(hashed_inputs.ternary((_ROWS,), seed=600 + rank))
    return layer


def _sample(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's single sample and its target, of {-1, 0, 1}."""
    return hashed_inputs.ternary((1, _COLUMNS), seed=700 + rank, every=2), hashed_inputs.ternary(
        (1, _ROWS), seed=800 + rank, every=2
    )
