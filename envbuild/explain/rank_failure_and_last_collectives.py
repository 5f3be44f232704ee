"""Finds the rank that failed first, and the last collectives of each rank, in the log of a distributed job. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from envbuild.explain.log_reader_and_search import Line, Log, log_pattern

T = TypeVar("T")
MOST = 4096
"""Maximum number of ranks that are compared."""


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and the line of its failure. `exit`: the exit code as torch elastic prints it,
    negative for a signal. `local`: the rank within its node; set only if the log does not have its rank in the job."""

    rank: int | None
    exit: int | None
    line: Line
    local: int | None = None


@dataclass(frozen=True)
class Work:
    """The numbers of the last enqueued and completed collective of a rank, as counted by NCCL's watchdog. `completed`:
    None if the log does not contain this number."""

    rank: int
    enqueued: int
    completed: int | None


@dataclass(frozen=True)
class Late:
    """The collective in which a rank timed out: its sequence number in the process group, and the operation as NCCL's
    watchdog names it (ALLREDUCE). `elements`: the number of elements of its input, None if the log does not have it."""

    rank: int
    number: int
    operation: str
    elements: int | None = None


@dataclass(frozen=True)
class Works:
    """The progress of the ranks of a process group. `last`: the last work of each rank in the log, in the order of
    ranks. `timed_out`: the collective in which each rank timed out; empty if `last` is not. `behind`: the ranks that
    the other ranks wait for, because they enqueued the fewest collectives, or, if all enqueued the same number,
    completed the fewest. If `last` is empty: the ranks that timed out in the earliest collective, or none if the ranks
    diverged. Also empty if all ranks made equal progress. `silent`: ranks of the job for which the log has no line
    about their work; known only for the group of all ranks. `diverged`: if ranks of one group waited in different kinds
    of collectives, the lowest rank that waited in each kind; or, if one collective has different sizes on the ranks,
    the lowest rank for each size."""

    last: tuple[Work, ...] = ()
    timed_out: tuple[Late, ...] = ()
    behind: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    diverged: tuple[Late, ...] = ()

    @property
    def mismatched(self) -> bool:
        """Whether ranks that diverged waited in collectives with the same number: they called different operations, or
        gave them different sizes."""
        return len({late.number for late in self.diverged}) < len(self.diverged)


_LAST = "ast enqueued"
_WORK = (
    r"(?:\[rank ?(?P<job>\d{1,5})\].{0,80})?"
    r"\[(?:pg (?:id )?(?P<id>\d{1,6})\b(?: pg guid (?P<guid>[^\] ]{1,80}))?.{0,40})?rank (?P<own>\d{1,5})\]"
    r".{0,160}last enqueued (?:nccl )?work: {0,2}(?P<enqueued>-?\d{1,9})"
    r"(?:.{0,20}last completed (?:nccl )?work: {0,2}(?P<completed>-?\d{1,9}))?"
)
_BEFORE, _AFTER = 350, 120
"""Number of characters before and after the text _LAST that are searched."""
_WORLD = ("", "0")
"""Names of the group of all ranks: empty (in older logs, whose groups have no names) or 0. Newer names contain
"default_pg"."""


def works(log: Log, count: int | None) -> Works:
    """Reads the last work of each rank in one process group: the group with the most ranks in the log. If no line
    reports a last work, `timed_out` and `behind` come from the lines about timeouts. `diverged` always comes from the
    lines about timeouts. `count`: the number of ranks, None if unknown."""
    groups: dict[str, dict[int, Work]] = {}
    for line in log.lines:  # all lines: find() samples lines that differ only in their numbers
        place = line.text.find(_LAST)
        near = line.text[max(0, place - _BEFORE) : place + _AFTER] if place >= 0 else ""
        if match := log_pattern(_WORK).search(near):
            rank, completed = int(match["job"] or match["own"]), match["completed"]
            work = Work(rank, int(match["enqueued"]), int(completed) if completed else None)
            groups.setdefault(match["guid"] or match["id"] or "", {})[rank] = work
    name, found = _largest(groups)
    last = tuple(found[rank] for rank in sorted(found))
    waiting = _timed_out(log)
    diverged = _diverged(waiting)
    behind = _least({work.rank: work.enqueued for work in last}) or _least(
        {work.rank: work.completed for work in last if work.completed is not None}
    )
    timed_out: tuple[Late, ...] = ()
    if not last:
        name, late = _largest(waiting)
        timed_out = tuple(late[rank] for rank in sorted(late))
        behind = () if diverged else _least({one.rank: one.number for one in timed_out})
    present = {work.rank for work in last} | {late.rank for late in timed_out}
    whole = name in _WORLD or "default_pg" in name
    known = count if whole and count and present and max(present) < count <= MOST else 0
    silent = tuple(rank for rank in range(known) if rank not in present)
    return Works(last, timed_out, behind, silent, diverged)


def _largest(groups: Mapping[str, dict[int, T]]) -> tuple[str, dict[int, T]]:
    """Returns the name of the group with the most ranks, and its ranks."""
    name = max(groups, key=lambda group: len(groups[group]), default="")
    return name, groups.get(name, {})


_TIMED_OUT = "ollective operation timeout"
_JOB = r"\[rank ?(\d{1,5})\]"
_GROUP = r"\[pg (?:id )?(\d{1,6})\b(?: pg guid ([^\] ]{1,80}))?"
_WAITS = r"seqnum=(\d{1,9}), {0,2}optype=(\w{1,40})(?:, {0,2}numelin=(\d{1,15})\b)?"
_EQUAL_SIZES = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE"})
"""The collectives whose input must have the same number of elements on all ranks."""
_MOST_LATE = 4 * MOST
"""Maximum number of lines about timed-out ranks that are read."""


def _timed_out(log: Log) -> dict[str, dict[int, Late]]:
    """Returns process group -> rank -> the first collective in which the rank timed out."""
    groups: dict[str, dict[int, Late]] = {}
    for line in islice((line for line in log.lines if _TIMED_OUT in line.text), _MOST_LATE):
        place = line.text.index(_TIMED_OUT)
        before, after = line.text[max(0, place - 2 * _BEFORE) : place], line.text[place : place + _AFTER]
        rank, waits = log_pattern(_JOB).search(before), log_pattern(_WAITS).search(after)
        if rank and waits:  # if the log has both, the rank in the job precedes the rank in the group
            group = log_pattern(_GROUP).search(before)
            late = Late(int(rank[1]), int(waits[1]), waits[2], int(waits[3]) if waits[3] else None)
            groups.setdefault((group[2] or group[1]) if group else "", {}).setdefault(late.rank, late)
    return groups


def _diverged(groups: Mapping[str, dict[int, Late]]) -> tuple[Late, ...]:
    """Returns one rank for each kind of collective, for the first process group whose ranks waited in different kinds;
    or one rank for each size, if the ranks gave one collective different sizes.

    Ranks that wait in collectives of the same kind with different numbers do not count: one of them is behind, or ran a
    different number of steps.
    """
    for found in groups.values():
        downward = sorted(found.values(), key=lambda late: -late.rank)
        first = {late.operation: late for late in downward}
        if len(first) > 1:
            return tuple(sorted(first.values(), key=lambda late: late.rank))
        sizes = dict[int, dict[int, Late]]()
        for late in downward:
            if late.elements is not None and late.operation in _EQUAL_SIZES:
                sizes.setdefault(late.number, {})[late.elements] = late
        for unequal in (each for each in sizes.values() if len(each) > 1):
            return tuple(sorted(unequal.values(), key=lambda late: late.rank))
    return ()


def _least(counts: Mapping[int, int]) -> tuple[int, ...]:
    """Returns the ranks with the lowest count; none if all ranks have the same count."""
    least = min(counts.values(), default=0)
    ranks = tuple(rank for rank, count in counts.items() if count == least)
    return ranks if len(ranks) < len(counts) else ()


_ROOT = r"root cause \(first observed failure\)"
_RANK_LINE = r"^\s{0,8}rank\s{0,8}: (\d{1,6}) \(local_rank: \d{1,4}\)"
_EXIT_LINE = r"^\s{0,8}exitcode\s{0,8}: (-?\d{1,4})\b"
_FAILED = r"failed \(exitcode: (-?\d{1,4})\) local_rank: (\d{1,5})"
_TROUBLE = (
    r"(?:\[rank ?(\d{1,5})\]|\brank[ =:]{0,2}(\d{1,5})\b).{0,200}(?:\b\w{0,40}(?:error|exception)\b"
    r"|out of memory|\bkilled\b|\bsig(?:fpe|segv|kill|abrt|bus|ill)\b)"
)
_FOLLOWS = (
    r"watchdog|processgroupnccl|distbackenderror|ncclremoteerror|nccl (?:error|warn|info)|data inconsistency"
    r"|connection (?:closed|reset)|broken pipe|socket timeout|childfailederror|sigterm"
)
_LATE = r"watchdog caught collective|ncclremoteerror|connection closed by|connection reset by|wait timeout after"


def first_failure(log: Log) -> Failure | None:
    """Finds the root cause that torch elastic reports, else the first failed child that it reports, else the first rank
    with an error."""
    for line, _ in log.find(log_pattern(_ROOT), 1):
        block = [o for o in log.lines if o.file == line.file and line.number < o.number <= line.number + 8]
        rank, status = _among(block, _RANK_LINE), _among(block, _EXIT_LINE)
        if rank or status:
            shown = (rank or status or (line, None))[0]
            return Failure(int(rank[1][1]) if rank else None, int(status[1][1]) if status else None, shown)
    for line, match in log.find(log_pattern(_FAILED), 1):
        return Failure(None, int(match[1]), line, local=int(match[2]))
    return _troubled(log)


def _troubled(log: Log) -> Failure | None:
    for line, match in log.find(log_pattern(_TROUBLE), 1, [log_pattern(_FOLLOWS)]):
        return Failure(int(match[1] or match[2]), None, line)
    return None


def by_itself(log: Log, failed: Failure) -> bool:
    """Whether the failed rank ended before the other ranks reported errors.

    It did if a signal that no watchdog sends ended it, or if its error precedes those of the other ranks. The order of
    lines in different files is unknown; the error of the failed rank then counts as the earlier one.
    """
    if failed.exit is not None and failed.exit < 0 and failed.exit not in (-signal.SIGABRT, -signal.SIGTERM):
        return True
    trouble, late = _troubled(log), log.find(log_pattern(_LATE), 1)
    if trouble is None or not late:
        return False
    return trouble.line.file != late[0][0].file or trouble.line.number < late[0][0].number


def _among(lines: Sequence[Line], pattern: str) -> tuple[Line, Any] | None:
    for line in lines:
        match = log_pattern(pattern).search(line.text)
        if match:
            return line, match
    return None
