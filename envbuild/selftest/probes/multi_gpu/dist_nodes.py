"""dist.nodes: ranks on several machines, first one on each machine and then all, over NCCL and over gloo.

Each machine has the image, runs this probe at the same time, and reports the results of its own ranks. All machines run
the same stages even after failures, because a machine cannot inform the others that it skips a stage. The deadlines of
all stages are counted from the start of the probe. A machine that takes no part in a stage, or fails in it early,
therefore waits for the others in the next stage.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

import torch
import torch.distributed

from envbuild.selftest.distributed import rank_processes_and_faults
from envbuild.selftest.distributed.rank_processes_and_faults import Among, Tried, World
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.probes.multi_gpu import dist_staged

CAP = 60.0  # seconds per stage; long enough because containers on several machines do not start at the same time
PROCESSES = 2  # per machine, on the CPU
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9.-]{1,253}):(?P<port>[0-9]{1,5})")
_INTERFACE = re.compile(r"[A-Za-z0-9._-]{1,15}")


@dataclass(frozen=True)
class Spot:
    """The position of this machine in the job: its number, the address of rank 0, and the network interface. Stage i
    uses port `port` + i."""

    number: int
    host: str
    port: int
    interface: str


@dataclass(frozen=True)
class NodeStage:
    """The members of a stage: `each` ranks on each of the machines in `nodes`."""

    backend: str
    nodes: tuple[int, ...]
    each: int

    @property
    def name(self) -> str:
        return f"{self.backend} nodes {'+'.join(map(str, self.nodes))} x{self.each}"


def stages(count: int, each: int, cuda: bool) -> list[NodeStage]:
    """Return the stages. If there are more than two machines, the first machine is paired with each other machine. Then
    all machines run together, first with one rank each and then with all ranks."""
    pairs = [((0, other), 1) for other in range(1, count)] if count > 2 else []
    everyone = tuple(range(count))
    worlds = [*pairs, *((everyone, size) for size in dict.fromkeys((1, each)))]
    return [NodeStage(backend, *world) for world in worlds for backend in (("nccl", "gloo") if cuda else ("gloo",))]


def dist_nodes(context: Context) -> None:
    """dist.nodes: ranks on several machines exchange data, sum and train; all results are exact to the last bit."""
    job = context.job
    if job.nodes < 2:
        raise Skip("needs two or more nodes: envbuild test --on slurm --nodes 2")
    if not torch.distributed.is_available():
        raise Skip(f"torch {torch.__version__} is built without torch.distributed")
    spot = _spot(job)
    each = PROCESSES if context.on_cpu else job.gpu_count
    cards = [] if context.on_cpu else dist_staged.visible_gpus(context)
    if cards and len(cards) < each:
        raise Skip(f"{len(cards)} of {each} GPUs visible on node {spot.number}")
    if context.on_cpu:
        dist_staged.import_ahead()
    done = []
    begin = time.monotonic()
    for number, stage in enumerate(stages(job.nodes, each, not context.on_cpu)):
        if spot.number in stage.nodes:
            context.step(stage.name)
            limit = begin + CAP * (number + 1) - time.monotonic()
            done.append((stage, _try(stage, spot, spot.port + number, job.device, limit)))
    _tell(context, spot, done)
    failed = {stage: tried for stage, tried in done if tried.stage.faults}
    for stage, tried in failed.items():
        first = tried.stage.faults[0]
        context.step(f"{stage.name}: {first.step}, rank {first.rank}")
        context.fail(first.kind, f"rank {first.rank} of {stage.name}: {first.reason}{_says(stage, done)}", first.signal)


def _try(stage: NodeStage, spot: Spot, port: int, device: str, limit: float) -> Tried:
    first = stage.nodes.index(spot.number) * stage.each
    among = Among(first, len(stage.nodes) * stage.each, f"{spot.host}:{port}", spot.interface)
    (tried,) = rank_processes_and_faults.run_worlds(
        [World(stage.backend, tuple(range(stage.each)), (), among)], device, limit
    )
    return tried


def _tell(context: Context, spot: Spot, done: list[tuple[NodeStage, Tried]]) -> None:
    context.traits.update(
        node=spot.number,
        interface=spot.interface,
        transports=sorted({name for _, tried in done for name in tried.stage.log.transports}),
        stages=[
            {"stage": stage.name, "passed": not tried.stage.faults, "seconds": round(tried.stage.seconds, 3)}
            for stage, tried in done
        ],
        **dist_staged.rates([tried for _, tried in done]),
    )
    for stage, tried in done:
        for case, (dtype, shape, error, seconds) in dist_staged.worst_by_case(tried).items():
            context.figure(f"{stage.name} {case}", getattr(torch, dtype), shape, error, 0.0, seconds)


def _says(failed: NodeStage, done: list[tuple[NodeStage, Tried]]) -> str:
    """Return a text that names the faulty layer, derived from the gloo result of the same machines."""
    if failed.backend == "gloo":
        return ""
    twin = NodeStage("gloo", failed.nodes, failed.each)
    passes = any(not tried.stage.faults for stage, tried in done if stage == twin)
    return f"; {'nccl fails and gloo passes: NCCL, or the fabric' if passes else 'gloo fails too: network or image'}"


def _spot(job: JobDocument) -> Spot:
    """Read the variables that the runner sets in the container. Raises RuntimeError if they are invalid for the job."""
    number, meeting, interface = (os.environ.get(f"ENVBUILD_{name}", "") for name in ("NODE", "MEETING", "INTERFACE"))
    found = _ADDRESS.fullmatch(meeting)
    if not (number.isdigit() and int(number) < job.nodes and found and _INTERFACE.fullmatch(interface)):
        position = f"number {number!r}, address {meeting!r}, interface {interface!r}"
        raise RuntimeError(f"invalid position in a job of {job.nodes} nodes: {position}")
    return Spot(int(number), found["host"], int(found["port"]), interface)
