"""Runs the real dist.staged with failing ranks: each seed breaks torch.distributed for some ranks, in real
processes."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # otherwise dist_staged.import_ahead imports it again in each seed's process
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from envbuild.selftest.distributed import rank_processes_and_faults, rank_program
from envbuild.selftest.distributed.rank_processes_and_faults import World
from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.multi_gpu import dist_staged
from envbuild.selftest.probes.probe_catalogue import PROBES as REAL

from .driver import Calls

Call = Callable[..., Any]
Where = Callable[["Here"], bool]
REAL_DIST: Any = torch.distributed
(STAGED,) = (probe for probe in REAL if probe.name == "dist.staged")


class Here:
    """The place of this process in its world: its rank, its member (a GPU's index; on a CPU, a number), and all members
    of the world."""

    member, rank, members = -1, -1, ()

    @property
    def size(self) -> int:
        return len(self.members)


HERE = Here()


def knowing_its_place(work: Call) -> Call:
    """Wrap rank_processes_and_faults._work so that HERE has the world and the rank of the process."""

    def made(world: World, rank: int, *rest: Any) -> forked_work.Work:
        def run(tell: forked_work.Tell) -> None:
            HERE.member, HERE.rank, HERE.members = world.members[rank], rank, world.members
            work(world, rank, *rest)(tell)

        return run

    return made


def seed(name: str, owner: Any, attribute: str, wrong: Callable[[Call], Call], where: Where, **limits: Any) -> Probe:
    """Return a probe: dist.staged with `owner.attribute` replaced by a wrong function in the ranks for which `where` is
    true. `limits`: values of dist_staged's constants."""

    def function(context: Context) -> None:
        right = getattr(owner, attribute)
        seeded = wrong(right)
        setattr(owner, attribute, lambda *args, **options: (seeded if where(HERE) else right)(*args, **options))
        module: Any = rank_processes_and_faults
        module._work = knowing_its_place(module._work)
        for limit, value in {"PROCESSES": 3, **limits}.items():
            setattr(dist_staged, limit, value)
        STAGED.function(context)

    return Probe(f"dist.staged:{name}", "quick", "cpu", 120, function, untouched=True)


def segv(right: Call) -> Call:
    return lambda *args, **options: ctypes.string_at(0)


def killed(right: Call) -> Call:
    return lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)


def leaves(right: Call) -> Call:
    return lambda *args, **options: os._exit(0)


def raises(right: Call) -> Call:
    def seeded(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: misaligned address\nmore")

    return seeded


def hangs(right: Call) -> Call:
    def busy_elsewhere(*args: Any, **options: Any) -> None:
        time.sleep(600)

    return busy_elsewhere


def wrong_sum(right: Call) -> Call:
    """Change one element of the sum, only in large tensors."""

    def seeded(values: torch.Tensor, *args: Any, **options: Any) -> None:
        right(values, *args, **options)
        if values.numel() > 65536:
            values[65536] += 1

    return seeded


def stale(right: Call) -> Call:
    """Return the result of the previous gather."""
    last: list[torch.Tensor] = []

    def seeded(gathered: list[torch.Tensor], *args: Any, **options: Any) -> None:
        right(gathered, *args, **options)
        before = last[-len(gathered) :] or gathered
        last.extend(values.clone() for values in gathered)
        for values, old in zip(gathered, before, strict=True):
            values.copy_(old)

    return seeded


def narrow(right: Call) -> Call:
    """Transfer sums in bfloat16; sums of small integers stay right."""

    def seeded(values: torch.Tensor, *args: Any, **options: Any) -> None:
        if values.dtype == torch.float32:
            values.copy_(values.to(torch.bfloat16))
        right(values, *args, **options)

    return seeded


def late_period(right: Call) -> Call:
    """Change the last element of a float16 matrix that has more than 2^17 elements."""

    def seeded(values: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = right(values, *args, **options)
        if values.dtype == torch.float16 and values.dim() == 2 and values.numel() > 1 << 17:
            values[-1, -1] += 1
        return work

    return seeded


def from_zero(right: Call) -> Call:
    """Return the maximum of all values and 0."""

    def seeded(values: torch.Tensor, *args: Any, **options: Any) -> None:
        right(values, *args, **options)
        if args and args[0] == torch.distributed.ReduceOp.MAX and values.dtype == torch.float32:
            values.clamp_(min=0)

    return seeded


def long_by_float(right: Call) -> Call:
    """Transfer int64 sums in float32."""

    def seeded(values: torch.Tensor, *args: Any, **options: Any) -> None:
        if values.dtype == torch.int64:
            values.copy_(values.float().long())
        right(values, *args, **options)

    return seeded


def from_the_start(right: Call) -> Call:
    """Send a part of a larger tensor from the larger tensor's first element on."""
    return lambda gathered, values: right(gathered, values.as_strided(values.shape, values.stride(), 0))


def evenly(right: Call) -> Call:
    """Drop the last element of parts of different lengths."""

    def seeded(received: torch.Tensor, values: torch.Tensor, *lengths: Any) -> None:
        right(received, values, *lengths)
        if lengths:
            received[lengths[0][0] - 1] = received[lengths[0][0]]

    return seeded


def others_part(right: Call) -> Call:
    """Scatter the parts of a sum to the wrong ranks."""

    def seeded(part: torch.Tensor, values: torch.Tensor) -> None:
        right(part, values.view(-1, len(part)).roll(1, 0).flatten())

    return seeded


def keeps_its_own(right: Call) -> Call:
    """Exchange nothing: each rank receives the data that it sent itself."""
    return lambda received, values: received.copy_(values)


def never_sent(right: Call) -> Call:
    return lambda work: []


def refused(right: Call) -> Call:
    """Fail with gloo's message."""

    def seeded(*args: Any, **options: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter\nmore")

    return seeded


def unequal_gradients(right: Call) -> Call:
    """Change the result of DDP's reduction by one."""

    def off(future: Any) -> torch.Tensor:
        result: torch.Tensor = future.value()[0] if isinstance(future.value(), list) else future.value()
        return result / torch.distributed.get_world_size() + 1

    def seeded(module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(module, **options)
        wrapped.register_comm_hook(
            None,
            lambda state, bucket: torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(off),
        )
        return wrapped

    return seeded


def noop(right: Call) -> Call:
    return right


def watched(context: Context) -> None:
    """Record the calls of torch in the probe's own process. Calls during imports are not counted, because there are
    many."""
    modules: tuple[Any, Any] = (dist_staged, torch.cuda)
    modules[0].import_ahead, modules[0].PROCESSES = lambda: None, 2
    modules[1].is_available = modules[1].device_count = raises(noop)
    with Calls() as calls:
        STAGED.function(context)
        own = list(calls.found)
        torch.zeros(1)
    context.traits.update(calls=own, touching=calls.found[-1:])


def together(here: Here) -> bool:
    return here.size > 1


INIT = "init_process_group"
PROBES = (
    # as in public reports: one rank works and several die (Amphion); one and two work, four do not (Step-Video)
    seed("all-die", REAL_DIST, INIT, segv, together),
    seed("four-die", REAL_DIST, INIT, segv, lambda here: here.size == 4 and here.rank == 3, PROCESSES=4),
    seed("one-dies-alone", REAL_DIST, INIT, segv, lambda here: here.member == 1),
    seed("each-dies-alone", REAL_DIST, INIT, segv, lambda here: True),
    seed("killed", REAL_DIST, "broadcast", killed, lambda here: here.member == 1 and here.size > 1),
    seed("hangs", REAL_DIST, "all_reduce", hangs, lambda here: here.size == 3 and here.rank == 2, CAP=5.0),
    seed("all-hang", rank_program.Rank, "_all_gather", hangs, lambda here: here.size == 3, CAP=5.0),
    seed("wrong-sum", REAL_DIST, "all_reduce", wrong_sum, lambda here: here.members == (0, 2) and here.rank == 1),
    seed("stale", REAL_DIST, "all_gather", stale, lambda here: here.size == 3 and here.rank == 1),
    seed("raises", REAL_DIST, "all_gather", raises, lambda here: here.size == 3 and here.rank == 0),
    seed("leaves", REAL_DIST, "broadcast", leaves, lambda here: here.size == 3 and here.rank == 1),
    seed("gradients", rank_program, "DistributedDataParallel", unequal_gradients, lambda here: here.member == 2),
    seed("narrow", REAL_DIST, "all_reduce", narrow, together, PROCESSES=2),
    seed("from-zero", REAL_DIST, "all_reduce", from_zero, together, PROCESSES=2),
    seed("long-by-float", REAL_DIST, "all_reduce", long_by_float, together, PROCESSES=2),
    seed("from-the-start", REAL_DIST, "all_gather", from_the_start, together, PROCESSES=2),
    seed("evenly", REAL_DIST, "all_to_all_single", evenly, together, PROCESSES=2),
    seed("late-period", REAL_DIST, "all_reduce", late_period, lambda here: here.rank == 1, PROCESSES=2),
    seed("scattered", REAL_DIST, "reduce_scatter_tensor", others_part, together, PROCESSES=2),
    seed("not-exchanged", REAL_DIST, "all_to_all_single", keeps_its_own, together, PROCESSES=2),
    seed("not-sent", REAL_DIST, "batch_isend_irecv", never_sent, together, PROCESSES=2),
    seed("refused", REAL_DIST, "reduce_scatter_tensor", refused, lambda here: True, PROCESSES=2),
    seed("no-time", REAL_DIST, "barrier", noop, lambda here: False, BUDGET=0.3),
    seed("right", REAL_DIST, "barrier", noop, lambda here: True),
    Probe("dist.staged:watched", "quick", "cpu", 120, watched, untouched=True),
)
