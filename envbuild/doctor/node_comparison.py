"""Compares the nodes of a cluster, and finds those that differ from the others. Pure. The description that a node
returns is untrusted until parsed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from envbuild.doctor.check_result import (
    Check,
    CheckRow,
    CheckState,
    Status,
    check_rows,
    counted,
    gib,
    ok,
    skipped_check,
    worst_state,
)
from envbuild.doctor.machine_checks_and_suitability import VERSION
from envbuild.doctor.machine_readings import clean
from envbuild.util.errors import some

MAX_BYTES = 1 << 20
"""The maximum size of one node's description."""
_MOST = 8
"""The maximum number of nodes that a message lists; the others are only counted."""
_JOB = ("gpu.", "shm", "rdma", "clock")

_Text = Annotated[str, StringConstraints(max_length=10_000), AfterValidator(lambda text: clean(text, 400))]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, defer_build=True)


class _Host(_Part):
    name: _Text


class _Gpu(_Part):
    name: _Text
    memory_total: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None  # bytes, as reported by NVML
    mig: bool = False


class _Driver(_Part):
    version: _Text | None = None
    cuda: _Text | None = None


class _Port(_Part):
    state: _Text
    link: _Text
    rate: _Text


class _Check(_Part):
    id: _Text
    state: Literal["ok", "warn", "fail", "skipped"]
    detail: _Text


class Described(_Part):
    """The part of the document of `doctor` that is compared; all other fields are ignored."""

    version: Literal[1]
    host: _Host
    driver: _Driver
    gpus: list[_Gpu]
    software: dict[_Text, _Text] = {}
    rdma: list[_Port] = []
    checks: list[_Check]


@dataclass(frozen=True)
class Node:
    """A node and its description. `fault`: why the description is missing."""

    name: str
    described: Described | None = None
    fault: str | None = None


def parse(name: str, text: str | bytes) -> Node:
    """Parses the output of `doctor --json` on a node. Never raises: for an invalid text, the node has a `fault`."""
    if len(text) > MAX_BYTES:
        return Node(name, fault=f"its description is larger than {MAX_BYTES} bytes")
    try:
        return Node(name, Described.model_validate_json(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = clean(".".join(map(str, first["loc"])), 60)
        wrong = f"{where or 'JSON'}: {clean(first['msg'], 100)}"
        return Node(name, fault=f"not a description of a machine in format version {VERSION} ({wrong})")


@dataclass(frozen=True)
class _Trait:
    """A property that should be equal on all nodes. `severity`: the status of the check if the property differs.
    `tell`: returns a node's value, or None if the node does not report one."""

    id: str
    severity: Status
    remedy: str
    tell: Callable[[Described], str | None]


def _software(name: str) -> Callable[[Described], str | None]:
    return lambda node: node.software.get(name)


def _sorted(names: Iterable[str]) -> str | None:
    """Counts the names in alphabetical order, so that the result does not depend on the slots of the GPUs."""
    return counted(sorted(names)) or None


_TRAITS = (
    _Trait("same.driver", "fail", "install one driver on all nodes", lambda node: node.driver.version),
    _Trait("same.gpus", "fail", "leave the node out, or lock a profile whose gpus lists all of its GPUs",
           lambda node: _sorted(gpu.name for gpu in node.gpus)),
    _Trait("same.memory", "warn", "plan for the smallest GPU",
           lambda node: _sorted(gib(gpu.memory_total) for gpu in node.gpus if gpu.memory_total)),
    _Trait("same.mig", "warn", "nvidia-smi -mig 0 on all nodes, or 1",
           lambda node: f"MIG on {sum(gpu.mig for gpu in node.gpus)} of {len(node.gpus)} GPUs" if node.gpus else None),
    _Trait("same.nccl", "fail", "run one image, or one environment, on all nodes", _software("nccl")),
    _Trait("same.nccl-system", "warn", "install one NCCL on all nodes, or none", _software("nccl-system")),
    _Trait("same.torch", "fail", "run one image, or one environment, on all nodes", _software("torch")),
    _Trait("same.toolkit", "warn", "install one CUDA toolkit on all nodes", _software("toolkit")),
    _Trait("same.rdma", "warn", "check adapters, cables and the subnet manager",
           lambda node: _sorted(f"{port.link} {port.rate} {port.state}".strip() for port in node.rdma)),
)  # fmt: skip


@dataclass(frozen=True)
class _Compared:
    """The values of a trait by node."""

    trait: _Trait
    values: Mapping[str, str | None]

    @property
    def counts(self) -> Counter[str | None]:
        return Counter(self.values.values())

    @property
    def usual(self) -> tuple[str | None, int] | None:
        """The value that more than half of the nodes have, and the number of these nodes; None if there is no such
        value."""
        most = self.counts.most_common(1)
        return most[0] if most and 2 * most[0][1] > len(self.values) else None

    @property
    def odd(self) -> list[str]:
        """The nodes whose value differs from the usual one. If no value is usual, all nodes."""
        usual = self.usual
        return [name for name, value in self.values.items() if usual is None or value != usual[0]]


def _compared(nodes: Sequence[Node]) -> list[_Compared]:
    answered = [(node.name, node.described) for node in nodes if node.described]
    return [_Compared(trait, {name: trait.tell(found) for name, found in answered}) for trait in _TRAITS]


def compare_nodes(nodes: Sequence[Node]) -> list[Check]:
    """Checks that every node answers, that its own checks do not fail, and that its properties are the same as those of
    the other nodes."""
    answered = {node.name: node.described for node in nodes if node.described}
    return [_answers(nodes), _sound(answered), *map(_same, _compared(nodes))]


def odd(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Returns node -> the ids of the checks whose value differs from the majority's. If no value has a majority, this
    is a difference of every node."""
    found: dict[str, list[str]] = {}
    for compared in _compared(nodes):
        for name in compared.odd:
            found.setdefault(name, []).append(compared.trait.id)
    return found


def _answers(nodes: Sequence[Node]) -> Check:
    silent = [f"{node.name}: {node.fault}" for node in nodes if node.described is None]
    if silent:
        remedy = (
            "is envbuild installed there? ssh -o BatchMode=yes NODE envbuild doctor --json, or srun --nodelist=NODE"
        )
        return Check("node.answers", "fail", "; ".join(_some(silent)), remedy)
    return ok("node.answers", f"all {some(len(nodes), 'node')}")


def _sound(answered: Mapping[str, Described]) -> Check:
    """Fails if a check that matters for a job failed on any node. Checks that matter only for a build do not count,
    because images may be built elsewhere."""
    bad = [
        f"{name}: {check.id}: {check.detail}"
        for name, node in answered.items() for check in node.checks
        if check.state == "fail" and check.id.startswith(_JOB) and check.id != "gpu.runtime"
    ]  # fmt: skip
    if bad:
        return Check(
            "node.sound", "fail", "; ".join(_some(bad)), "run envbuild doctor on that node: it shows what to do"
        )
    return (
        ok("node.sound", "no check that matters for a job failed")
        if answered
        else skipped_check("node.sound", "no node answered")
    )


def _same(compared: _Compared) -> Check:
    trait, values, counts, usual = compared.trait, compared.values, compared.counts, compared.usual
    if set(counts) <= {None}:
        return skipped_check(trait.id, "no node reports it")
    if len(values) == 1:
        return skipped_check(trait.id, "only one node answered")
    if len(counts) == 1:
        return ok(trait.id, f"{next(iter(counts))} on all {len(values)} nodes")
    if usual is None:
        groups = (
            f"{value or 'none'}: {', '.join(_some([n for n, v in values.items() if v == value]))}" for value in counts
        )
        return Check(trait.id, trait.severity, f"no majority: {'; '.join(groups)}", trait.remedy)
    differing = [f"{name} has {values[name] or 'none'}" for name in compared.odd]
    detail = f"{', '.join(_some(differing))}; the other {usual[1]} nodes have {usual[0] or 'none'}"
    return Check(trait.id, trait.severity, detail, trait.remedy)


def _some(texts: Sequence[str]) -> Iterator[str]:
    yield from texts[:_MOST]
    if len(texts) > _MOST:
        yield f"and {len(texts) - _MOST} more"


@dataclass(frozen=True)
class NodeRow:
    """A node. `state`: different if it differs from the other nodes; `differences` then has the ids of the checks that
    found this. unknown: the node's description is missing; `fault` is the reason."""

    name: str
    state: Literal["same", "different", "unknown"]
    fault: str | None
    differences: tuple[str, ...]
    description: Described | None


@dataclass(frozen=True)
class ClusterDocument:
    """The document of `doctor --cluster`. The description of a node contains only the values that are compared."""

    version: int
    state: CheckState
    nodes: tuple[NodeRow, ...]
    checks: tuple[CheckRow, ...]


def document(nodes: Sequence[Node], checks: Sequence[Check]) -> ClusterDocument:
    differing = odd(nodes)
    rows = tuple(
        NodeRow(
            node.name,
            "unknown" if node.described is None else "different" if differing.get(node.name) else "same",
            node.fault,
            tuple(differing.get(node.name, ())),
            node.described,
        )
        for node in nodes
    )
    return ClusterDocument(VERSION, worst_state(checks), rows, check_rows(checks))
