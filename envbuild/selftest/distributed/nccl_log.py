"""Reads from NCCL's log (NCCL_DEBUG=INFO) its version, the transports between its ranks, and its warnings.

The patterns match the messages of NCCL 2.14 (torch 2.0) and newer, which are in p2p.cc, shm.cc and net.cc of
src/transport and in src/init.cc. All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRANSPORTS = ("p2p", "nvls", "shm", "ib", "net", "socket")

# Examples: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "... [send] via NET/Socket/0". Brackets after a rank may
# contain a PCI bus id.
_EDGE = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? : \d+\S* -> \d+\S*(?: \[(?:send|receive)\])? via ([A-Z0-9]+)/(\S+)")
# NVLS is not a connection between two ranks: its channels reduce in the NVLink switch. They are used in addition to the
# connections between ranks.
_NVLS = re.compile(r"NCCL INFO .*\b([1-9]\d*) nvls channels")
_VERSION = re.compile(r"(?:^|NCCL INFO )NCCL version (\d+(?:\.\d+)+)", re.MULTILINE)
_WARNING = re.compile(r"NCCL WARN (.+)")
_LONG = 300  # characters of a warning that are kept


@dataclass(frozen=True)
class NcclLog:
    """What NCCL's log reports.

    `edges`: the transports of the connections between ranks, in the order of TRANSPORTS. `nvls`: whether NVLink SHARP
    is used, which has channels of its own.
    """

    version: str | None = None
    edges: tuple[str, ...] = ()
    nvls: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def transports(self) -> tuple[str, ...]:
        found = {*self.edges, *(["nvls"] if self.nvls else [])}
        return tuple(name for name in TRANSPORTS if name in found)


def read(text: str) -> NcclLog:
    """Read the log of one rank, or the joined logs of several ranks."""
    version = _VERSION.search(text)
    edges = {_kind(kind, rest) for kind, rest in _EDGE.findall(text)}
    return NcclLog(
        version=version[1] if version else None,
        edges=tuple(name for name in TRANSPORTS if name in edges),
        nvls=bool(_NVLS.search(text)),
        warnings=tuple(line[:_LONG].strip() for line in dict.fromkeys(_WARNING.findall(text))),
    )


def objection(required: str, logs: Iterable[tuple[str, NcclLog]]) -> str | None:
    """Return a sentence about the first stage that does not use only the required transport; None if all stages do.

    `logs` contains the name and the log of each stage. For "nvls" it suffices that a stage uses NVLS.
    """
    for stage, log in logs:
        used = ", ".join(log.transports) or "no transport that its log names"
        fits = log.nvls if required == "nvls" else log.edges == (required,)
        if not fits:
            return f"{stage} uses {used}, the profile requires {required}"
    return None


def _kind(kind: str, rest: str) -> str:
    if kind != "NET":
        return kind.lower()
    return "socket" if rest.startswith("Socket") else "ib" if rest.startswith("IB") else "net"
