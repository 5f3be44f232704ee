"""What one rank of a world does, step by step: join, reduce, gather, broadcast, train, leave; each result exact.

Runs in a process of its own (ranks.py). All values are small integers, so every dtype and order of summation gives the
same sums, and the host knows them: the inputs of every rank come from counters.
"""

from __future__ import annotations

import datetime
import functools
import time
from dataclasses import dataclass
from typing import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from envbuild.selftest import inputs
from envbuild.selftest.apart import Tell
from envbuild.selftest.context import dtype_name, short_name
from envbuild.selftest.reference import compare

# A rank that waits is ended by its stage's cap; torch's own time-out, which kills processes, must not come before.
_PATIENCE = datetime.timedelta(minutes=30)
_PERIOD = 65537  # elements: no power of two, so that a chunk in the wrong place is seen
_ROUNDS = 2  # each with inputs of its own, so that the result of the round before is wrong
# Elements: odd ones (bf16 ones faulted with a misaligned address, pytorch#119345); on a GPU also as many as NCCL moves
# with each of its protocols: LL, LL128, Simple.
_SMALL = 1001
_LARGE = 4 * 1024 * 1024 + 1
_ROWS, _COLUMNS = 32, 64  # of the trained layer

# What is told: the number and name of the step that begins; under a case's name its dtype, shape, error and seconds,
# and where its result is wrong, the step and a sentence; and that all is done.
STEP, DONE, FIGURE, WRONG = "step", "done", "figure ", "wrong "


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its number among `size`, its device, the URL at which the ranks meet."""

    backend: str
    rank: int
    size: int
    device: torch.device
    meeting: str

    @property
    def moved(self) -> torch.device:
        """Where the tensors lie that are sent: gloo's are the host's, since no torch has all of it for a GPU's."""
        return self.device if self.backend == "nccl" else torch.device("cpu")


class Rank:
    """Does the steps and tells of each: that it begins, its figures, the first thing that is wrong with it."""

    def __init__(self, place: Place, tell: Tell) -> None:
        self.place = place
        self._tell = tell
        self._step = ""
        self._count = 0

    def run(self) -> None:
        """All steps. Raises what torch raises; what comes out wrong is told, and the next step is done."""
        self._begin("init")
        self._join()
        for size, dtype in self._reductions():
            self._each(f"all_reduce {short_name(dtype)} {size}", self._all_reduce, size, dtype)
        self._each(f"all_gather fp32 {_SMALL}", self._all_gather, _SMALL, torch.float32)
        self._each(f"broadcast fp32 {_SMALL}", self._broadcast, _SMALL, torch.float32)
        self._begin("ddp")
        self._train()
        self._begin("leave")
        dist.destroy_process_group()
        self._tell(DONE, True)

    def _reductions(self) -> list[tuple[int, torch.dtype]]:
        small = [(_SMALL, torch.float32), (_SMALL, torch.int32), (_PERIOD, torch.float32)]
        if self.place.backend != "nccl":
            return small
        return [*small, (_SMALL, torch.bfloat16), (_LARGE, torch.float32)]

    def _begin(self, step: str) -> None:
        self._step = step
        self._count += 1
        self._tell(STEP, [self._count, step])

    def _each(self, step: str, work: Callable[[int, int, torch.dtype], None], size: int, dtype: torch.dtype) -> None:
        self._begin(step)
        for turn in range(_ROUNDS):
            work(turn, size, dtype)

    def _join(self) -> None:
        """The process group, and with a barrier NCCL's communicator, which is made by the first collective."""
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

    def _all_reduce(self, turn: int, size: int, dtype: torch.dtype) -> None:
        values = _values(turn, self.place.rank, size).to(self.place.moved, dtype)
        expected = torch.zeros(size)
        for rank in range(self.place.size):
            expected += _values(turn, rank, size)
        seconds = self._timed(lambda: dist.all_reduce(values))
        self._check(self._step, values, expected, seconds)

    def _all_gather(self, turn: int, size: int, dtype: torch.dtype) -> None:
        given = [_values(turn, rank, size) for rank in range(self.place.size)]
        values = given[self.place.rank].to(self.place.moved, dtype)
        gathered = [torch.zeros_like(values) for _ in given]
        seconds = self._timed(lambda: dist.all_gather(gathered, values))
        self._check(self._step, torch.stack(gathered), torch.stack(given), seconds)

    def _broadcast(self, turn: int, size: int, dtype: torch.dtype) -> None:
        """From every rank in turn."""
        for source in range(self.place.size):
            expected = _values(turn, source, size)
            sent = expected.clone() if source == self.place.rank else torch.zeros(size)
            sent = sent.to(self.place.moved, dtype)
            seconds = self._timed(functools.partial(dist.broadcast, sent, source))
            self._check(self._step, sent, expected, seconds)

    def _train(self) -> None:
        """One step of a layer under DistributedDataParallel, against one process with all ranks' samples.

        DDP multiplies each gradient by 1 / size before it sums. With losses times `size` and one sample a rank, each is
        0 or +-size before that, and 0 or +-1 after it in any dtype: the sums are exact for every size.
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


def _values(turn: int, rank: int, size: int) -> torch.Tensor:
    """float32 of {-1, 0, 1}, of a rank's own in each turn."""
    repeats = -(-size // _PERIOD)
    return inputs.ternary((min(size, _PERIOD),), seed=1000 * (turn + 1) + rank).repeat(repeats)[:size]


def _layer(rank: int) -> torch.nn.Linear:
    """With other weights on each rank: DDP gives all the first one's."""
    layer = torch.nn.Linear(_COLUMNS, _ROWS)
    with torch.no_grad():
        layer.weight.copy_(inputs.ternary((_ROWS, _COLUMNS), seed=500 + rank))
        layer.bias.copy_(inputs.ternary((_ROWS,), seed=600 + rank))
    return layer


def _sample(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's one sample and its target, of {-1, 0, 1}."""
    return inputs.ternary((1, _COLUMNS), seed=700 + rank, every=2), inputs.ternary((1, _ROWS), seed=800 + rank, every=2)
