"""Nodes compared: which one differs from the others. Pure; what a node says of itself is hostile until parsed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError

from envbuild.host.check import Check, Status, counted, gib, ok, skipped
from envbuild.host.model import clean
from envbuild.host.verdict import VERSION

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
    memory_total: int | None = None
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


_TRAITS = (
    _Trait("same.driver", "fail", "install one driver on all nodes", lambda node: node.driver.version),
    _Trait("same.cuda", "fail", "install one driver on all nodes", lambda node: node.driver.cuda),
    _Trait("same.gpus", "fail", "leave the node out, or lock a profile whose gpus lists all its cards",
           lambda node: counted(gpu.name for gpu in node.gpus) or None),
    _Trait("same.memory", "warn", "count with the smallest card",
           lambda node: counted(gib(gpu.memory_total) for gpu in node.gpus if gpu.memory_total) or None),
    _Trait("same.mig", "warn", "nvidia-smi -mig 0 on all nodes, or 1",
           lambda node: (f"on {sum(gpu.mig for gpu in node.gpus)} of {len(node.gpus)}") if node.gpus else None),
    _Trait("same.nccl", "fail", "run one image, or one environment, on all nodes", _software("nccl")),
    _Trait("same.nccl-system", "warn", "install one NCCL on all nodes, or none", _software("nccl-system")),
    _Trait("same.torch", "fail", "run one image, or one environment, on all nodes", _software("torch")),
    _Trait("same.toolkit", "warn", "install one CUDA toolkit on all nodes", _software("toolkit")),
    _Trait("same.rdma", "warn", "check cards, cables and the subnet manager",
           lambda node: counted(f"{port.link} {port.rate} {port.state}".strip() for port in node.rdma) or None),
)  # fmt: skip


def compare(nodes: Sequence[Node]) -> list[Check]:
    """Whether every node answers and is sound, and what is not the same on all; the odd one is named."""
    answered = {node.name: node.described for node in nodes if node.described}
    return [_answers(nodes), _sound(answered), *(_same(trait, answered) for trait in _TRAITS)]


def odd(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """By node, the ids in which it is not as most are; all nodes, where no value is the most usual."""
    found: dict[str, list[str]] = {}
    for trait in _TRAITS:
        values = {node.name: trait.tell(node.described) for node in nodes if node.described}
        usual = _usual(list(values.values()))
        for name, value in values.items():
            if len(set(values.values())) > 1 and (usual is None or value != usual[0]):
                found.setdefault(name, []).append(trait.id)
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
    return ok("node.sound", "no node has a failed check") if answered else skipped("node.sound", "no node answered")


def _same(trait: _Trait, answered: Mapping[str, Described]) -> Check:
    values = {name: trait.tell(node) for name, node in answered.items()}
    told = Counter(values.values())
    if not answered or set(told) == {None}:
        return skipped(trait.id, "no node tells")
    if len(values) == 1:
        return skipped(trait.id, "one node alone answered")
    if len(told) == 1:
        return ok(trait.id, f"{next(iter(told))} on all {len(values)}")
    usual = _usual(list(values.values()))
    if usual is None:
        groups = (
            f"{value or 'none'}: {', '.join(_some([n for n, v in values.items() if v == value]))}" for value in told
        )
        return Check(trait.id, trait.severity, f"no majority: {'; '.join(groups)}", trait.remedy)
    differing = [f"{name} has {value or 'none'}" for name, value in values.items() if value != usual[0]]
    detail = f"{', '.join(_some(differing))}; the other {usual[1]} have {usual[0] or 'none'}"
    return Check(trait.id, trait.severity, detail, trait.remedy)


def _usual(values: Sequence[str | None]) -> tuple[str | None, int] | None:
    """The value that more than half have, and how many."""
    value, count = Counter(values).most_common(1)[0] if values else (None, 0)
    return (value, count) if 2 * count > len(values) else None


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
