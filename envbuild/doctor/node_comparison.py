"""Nodes compared: which one differs from the others. Pure; what a node says of itself is hostile until parsed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from envbuild.doctor.check_result import Check, Status, counted, gib, ok, skipped_check
from envbuild.doctor.machine_checks_and_suitability import VERSION
from envbuild.doctor.model import clean

MAX_BYTES = 1 << 20
"""Of one node's document."""
_MOST = 8
"""Nodes that a line names; more are counted."""
_JOB = ("gpu.", "shm", "rdma", "clock")

_Text = Annotated[str, StringConstraints(max_length=10_000), AfterValidator(lambda text: clean(text, 400))]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Host(_Part):
    name: _Text


class _Gpu(_Part):
    name: _Text
    memory_total: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None  # as NVML counts
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
    status: Literal["ok", "warn", "fail", "skipped"]
    detail: _Text


class Described(_Part):
    """What is read of a machine's description; the rest of it is ignored."""

    version: Literal[1]
    host: _Host
    driver: _Driver
    gpus: list[_Gpu]
    software: dict[_Text, _Text] = {}
    rdma: list[_Port] = []
    checks: list[_Check]


@dataclass(frozen=True)
class Node:
    """`fault`: why there is no description of it."""

    name: str
    described: Described | None = None
    fault: str | None = None


def parse(name: str, text: str | bytes) -> Node:
    """A node by what `doctor --json` wrote there. Never raises."""
    if len(text) > MAX_BYTES:
        return Node(name, fault=f"its description is larger than {MAX_BYTES} bytes")
    try:
        return Node(name, Described.model_validate_json(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = clean(".".join(map(str, first["loc"])), 60)
        wrong = f"{where or 'JSON'}: {clean(first['msg'], 100)}"
        return Node(name, fault=f"what it says is no description of a machine, version {VERSION} ({wrong})")


@dataclass(frozen=True)
class _Trait:
    """What should be equal on all nodes. `severity` of a difference; `tell`: a node's value, None where it has none."""

    id: str
    severity: Status
    remedy: str
    tell: Callable[[Described], str | None]


def _software(name: str) -> Callable[[Described], str | None]:
    return lambda node: node.software.get(name)


def _sorted(names: Iterable[str]) -> str | None:
    """Counted, in an order that does not depend on which slot a card is in."""
    return counted(sorted(names)) or None


_TRAITS = (
    _Trait("same.driver", "fail", "install one driver on all nodes", lambda node: node.driver.version),
    _Trait("same.gpus", "fail", "leave the node out, or lock a profile whose gpus lists all its cards",
           lambda node: _sorted(gpu.name for gpu in node.gpus)),
    _Trait("same.memory", "warn", "count with the smallest card",
           lambda node: _sorted(gib(gpu.memory_total) for gpu in node.gpus if gpu.memory_total)),
    _Trait("same.mig", "warn", "nvidia-smi -mig 0 on all nodes, or 1",
           lambda node: (f"on {sum(gpu.mig for gpu in node.gpus)} of {len(node.gpus)}") if node.gpus else None),
    _Trait("same.nccl", "fail", "run one image, or one environment, on all nodes", _software("nccl")),
    _Trait("same.nccl-system", "warn", "install one NCCL on all nodes, or none", _software("nccl-system")),
    _Trait("same.torch", "fail", "run one image, or one environment, on all nodes", _software("torch")),
    _Trait("same.toolkit", "warn", "install one CUDA toolkit on all nodes", _software("toolkit")),
    _Trait("same.rdma", "warn", "check cards, cables and the subnet manager",
           lambda node: _sorted(f"{port.link} {port.rate} {port.state}".strip() for port in node.rdma)),
)  # fmt: skip


@dataclass(frozen=True)
class _Compared:
    """A trait's value by node."""

    trait: _Trait
    values: Mapping[str, str | None]

    @property
    def told(self) -> Counter[str | None]:
        return Counter(self.values.values())

    @property
    def usual(self) -> tuple[str | None, int] | None:
        """The value that more than half have, and how many."""
        most = self.told.most_common(1)
        return most[0] if most and 2 * most[0][1] > len(self.values) else None

    @property
    def odd(self) -> list[str]:
        """The nodes that have another; all, where no value is the usual one."""
        usual = self.usual
        return [name for name, value in self.values.items() if usual is None or value != usual[0]]


def _compared(nodes: Sequence[Node]) -> list[_Compared]:
    answered = [(node.name, node.described) for node in nodes if node.described]
    return [_Compared(trait, {name: trait.tell(found) for name, found in answered}) for trait in _TRAITS]


def compare_nodes(nodes: Sequence[Node]) -> list[Check]:
    """Whether every node answers and is sound, and what is not the same on all; the odd one is named."""
    answered = {node.name: node.described for node in nodes if node.described}
    return [_answers(nodes), _sound(answered), *map(_same, _compared(nodes))]


def odd(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """By node, the ids in which it is not as most are; all nodes, where no value is the most usual."""
    found: dict[str, list[str]] = {}
    for compared in _compared(nodes):
        for name in compared.odd:
            found.setdefault(name, []).append(compared.trait.id)
    return found


def _answers(nodes: Sequence[Node]) -> Check:
    silent = [f"{node.name}: {node.fault}" for node in nodes if node.described is None]
    if silent:
        remedy = "is envbuild there? By hand: ssh -o BatchMode=yes NODE envbuild doctor --json, or srun --nodelist=NODE"
        return Check("node.answers", "fail", "; ".join(_some(silent)), remedy)
    return ok("node.answers", f"all {len(nodes)}")


def _sound(answered: Mapping[str, Described]) -> Check:
    """What each node's own checks say, of what a job needs there; images may be made elsewhere."""
    bad = [
        f"{name}: {check.id}: {check.detail}"
        for name, node in answered.items() for check in node.checks
        if check.status == "fail" and check.id.startswith(_JOB) and check.id != "gpu.runtime"
    ]  # fmt: skip
    if bad:
        return Check("node.sound", "fail", "; ".join(_some(bad)), "envbuild doctor on that node says what to do")
    return (
        ok("node.sound", "no failed check of what a job needs")
        if answered
        else skipped_check("node.sound", "no node answered")
    )


def _same(compared: _Compared) -> Check:
    trait, values, told, usual = compared.trait, compared.values, compared.told, compared.usual
    if set(told) <= {None}:
        return skipped_check(trait.id, "no node tells")
    if len(values) == 1:
        return skipped_check(trait.id, "one node alone answered")
    if len(told) == 1:
        return ok(trait.id, f"{next(iter(told))} on all {len(values)}")
    if usual is None:
        groups = (
            f"{value or 'none'}: {', '.join(_some([n for n, v in values.items() if v == value]))}" for value in told
        )
        return Check(trait.id, trait.severity, f"no majority: {'; '.join(groups)}", trait.remedy)
    differing = [f"{name} has {values[name] or 'none'}" for name in compared.odd]
    detail = f"{', '.join(_some(differing))}; the other {usual[1]} have {usual[0] or 'none'}"
    return Check(trait.id, trait.severity, detail, trait.remedy)


def _some(texts: Sequence[str]) -> Iterator[str]:
    yield from texts[:_MOST]
    if len(texts) > _MOST:
        yield f"and {len(texts) - _MOST} more"


def document(nodes: Sequence[Node], checks: Sequence[Check]) -> dict[str, Any]:
    """{"version", "nodes": [{"name", "fault", "odd", "description"}], "checks"}; of descriptions, what is compared."""
    differing = odd(nodes)
    return {
        "version": VERSION,
        "nodes": [
            {
                "name": node.name,
                "fault": node.fault,
                "odd": differing.get(node.name, []),
                "description": node.described.model_dump() if node.described else None,
            }
            for node in nodes
        ],
        "checks": [{"id": c.id, "status": c.status, "detail": c.detail, "remedy": c.remedy} for c in checks],
    }
