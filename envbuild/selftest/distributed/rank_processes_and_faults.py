"""Runs the ranks of a stage as processes, and determines the faults of the ranks from how their processes ended.

The process that starts the ranks calls no function of torch. Each rank is a forked process and initialises CUDA itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from envbuild.selftest.distributed import nccl_log
from envbuild.selftest.distributed.fault_localization import Stage, StageFault
from envbuild.selftest.distributed.nccl_log import NcclLog
from envbuild.selftest.distributed.rank_program import DONE, STEP, WRONG, Rank, RankPlace
from envbuild.selftest.harness import forked_work, locked_temporary_folder
from envbuild.selftest.harness.forked_work import ForkEnding, Tell, Work

GRACE = 2.0  # seconds that the other ranks have left after one rank has failed
_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
_LOG_LIMIT = 4 << 20  # the most bytes that are read of a rank's NCCL log
# A frame in a stack from faulthandler, which lists the innermost function first.
_FRAME = re.compile(r'File "(?P<file>[^"\n]*)", line \d+ in (?P<function>\S+)')
# Parts of the errors that gloo and NCCL report in a rank that has lost the connection to another rank.
_LOST = re.compile(r"(closed|reset) by peer|broken pipe|ncclRemoteError|remote process", re.IGNORECASE)


@dataclass(frozen=True)
class World:
    """The ranks of a stage that run on this machine.

    `members`: the indices of their GPUs, or the numbers of their processes on the CPU. `among`: the position of these
    ranks in a larger world whose other ranks run on other machines; None if there are no other machines.
    """

    backend: str
    members: tuple[int, ...]
    settings: tuple[str, ...] = ()
    among: Among | None = None


@dataclass(frozen=True)
class Among:
    """The position of this machine's ranks in a world of `size` ranks on several machines.

    `first`: the lowest rank on this machine. `meeting`: host:port at which rank 0 accepts the other ranks. `interface`:
    the network interface that connects the machines.
    """

    first: int
    size: int
    meeting: str
    interface: str

    @property
    def variables(self) -> dict[str, str]:
        return {"NCCL_SOCKET_IFNAME": self.interface, "GLOO_SOCKET_IFNAME": self.interface}


@dataclass(frozen=True)
class Tried:
    """The result of running a world: the stage with its faults, and how the process of each rank ended."""

    stage: Stage
    endings: tuple[ForkEnding, ...]


def run_worlds(worlds: Sequence[World], device: str, limit: float) -> list[Tried]:
    """Run worlds that have no common members, all at the same time, for at most `limit` seconds."""
    with locked_temporary_folder.temporary_folder("envbuild-ranks-") as folder:
        places = [folder / str(number) for number in range(len(worlds))]
        groups = []
        for world, place in zip(worlds, places):
            place.mkdir()
            groups.append([_work(world, rank, device, place) for rank in range(len(world.members))])
        endings = forked_work.run_groups(groups, limit, GRACE)
        logs = [_log(place) for place in places]
    return [Tried(_stage(*parts), tuple(parts[1])) for parts in zip(worlds, endings, logs)]


def _work(world: World, rank: int, device: str, folder: Path) -> Work:
    def work(tell: Tell) -> None:
        settings = dict(setting.split("=", 1) for setting in world.settings)
        # If all ranks are on this machine, they use the loopback interface, because there may be no other network.
        among = world.among or Among(0, len(world.members), "", "lo")
        log = {"NCCL_DEBUG_FILE": str(folder / f"nccl.{rank}")}
        os.environ.update({**_VARIABLES, **among.variables, **settings, **log})
        torch.set_num_threads(1)
        at = torch.device(device, world.members[rank]) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(at)
        meeting = f"tcp://{among.meeting}" if among.meeting else f"file://{folder / 'meeting'}"
        Rank(RankPlace(world.backend, among.first + rank, among.size, at, meeting), tell).run()

    return work


def _log(folder: Path) -> NcclLog:
    texts = []
    for file in sorted(folder.glob("nccl.*")):
        with contextlib.suppress(OSError), file.open("rb") as stream:
            texts.append(stream.read(_LOG_LIMIT).decode("utf-8", "replace"))
    return nccl_log.read("\n".join(texts))


def _stage(world: World, endings: Sequence[ForkEnding], log: NcclLog) -> Stage:
    first = world.among.first if world.among else 0
    found = tuple(dataclasses.replace(fault, rank=first + fault.rank) for fault in rank_faults(world.members, endings))
    if found and log.warnings:
        reason = f"{found[0].reason}; NCCL's first warning: {log.warnings[0]}"
        found = (dataclasses.replace(found[0], reason=reason), *found[1:])
    return Stage(
        backend=world.backend,
        members=world.members,
        settings=world.settings,
        faults=found,
        seconds=max(ending.seconds for ending in endings),
        log=log,
    )


def rank_faults(members: Sequence[int], endings: Sequence[ForkEnding]) -> tuple[StageFault, ...]:
    """Return the faults of the ranks that caused a failure, the earliest first.

    Other ranks that did not finish only waited for the returned ranks, or lost the connection to them. The returned
    ranks are the first of these groups that is not empty:

    1. Ranks killed by a signal other than SIGABRT, which is how torch itself ends a rank that lost a connection.
    2. Ranks with wrong results, and ranks that failed before a time limit with the same error as the first of them.
       For this purpose, ranks that report a lost connection count as later than all others.
    3. Of the ranks that were stopped at a time limit: those that are behind in the sequence of steps, or else those
       that did not wait inside torch, or else all.
    """
    ranks = sorted(range(len(endings)), key=lambda rank: (_lost_another(endings[rank]), endings[rank].moment))
    dead = [rank for rank in ranks if endings[rank].signal not in (None, "SIGABRT")]
    wrong = [rank for rank in ranks if _wrong(endings[rank])]
    left = [rank for rank in ranks if not endings[rank].stopped and not _whole(endings[rank])]
    same = [rank for rank in left if endings[rank].failure == endings[left[0]].failure]
    blamed = dead or [*wrong, *same] or _outstanding([rank for rank in ranks if endings[rank].stopped], endings)
    return tuple(_fault(rank, members[rank], endings[rank]) for rank in dict.fromkeys(blamed))


def _whole(ending: ForkEnding) -> bool:
    return ending.failure is None and DONE in ending.reported


def _lost_another(ending: ForkEnding) -> bool:
    return bool(_LOST.search(ending.failure or ""))


def _wrong(ending: ForkEnding) -> tuple[str, str] | None:
    """Return the step of the first wrong result, and a sentence about the result; None if no result is wrong."""
    for key in ending.reported:
        if key.startswith(WRONG):
            step, sentence = ending.reported[key]
            return str(step), str(sentence)
    return None


def _outstanding(stuck: Sequence[int], endings: Sequence[ForkEnding]) -> Sequence[int]:
    furthest = max((_step(endings[rank])[0] for rank in stuck), default=0)
    behind = [rank for rank in stuck if _step(endings[rank])[0] < furthest]
    elsewhere = [rank for rank in stuck if "/torch/" not in _stack(endings[rank])[0]]
    return sorted(behind or elsewhere or stuck)


def _step(ending: ForkEnding) -> tuple[int, str]:
    number, name = ending.reported.get(STEP, (0, "start"))
    return int(number), str(name)


def _stack(ending: ForkEnding) -> tuple[str, str]:
    """Return the file and the name of the function in which the process was when it was stopped; empty if unknown."""
    found = _FRAME.search(ending.noise, max(0, ending.noise.rfind("Fatal Python error")))
    return (found["file"], found["function"]) if found else ("", "")


def _fault(rank: int, member: int, ending: ForkEnding) -> StageFault:
    wrong = _wrong(ending)
    step = _step(ending)[1]
    if ending.signal == "SIGKILL":
        return StageFault(rank, member, step, "oom", "killed: out of memory or a limit", ending.signal)
    if ending.signal:
        return StageFault(rank, member, step, "signal", f"died of {ending.signal}", ending.signal)
    if wrong:
        return StageFault(rank, member, wrong[0], "mismatch", wrong[1])
    if ending.stopped:
        function = _stack(ending)[1]
        return StageFault(rank, member, step, "hang", f"{ending.failure}" + (f", in {function}" if function else ""))
    if ending.failure is None:
        return StageFault(rank, member, step, "incomplete", "exited before its last step")
    return StageFault(rank, member, step, "exception" if "error" in ending.reported else "exit", ending.failure)
