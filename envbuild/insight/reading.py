"""What a log says of where it comes from: versions, GPUs, driver, and which rank failed first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

from envbuild.insight import ranks
from envbuild.insight.logs import TRIED, Line, Log, compiled
from envbuild.insight.ranks import Failure, Works
from envbuild.plan import facts, signatures
from envbuild.plan.advisories import UNLISTED, Gpu, Situation

# The first pattern that fits, in its first line, is believed.
_TORCH = (
    r"pytorch version: {0,4}v?(\d{1,2}\.\d{1,3}\.\d{1,3}[a-z0-9.+]{0,40})",
    r"\btorch==(\d{1,2}\.\d{1,3}\.\d{1,3}[a-z0-9.+]{0,40})",
    r"\b(?:py)?torch(?:[ _.-]{0,2}(?:_?_?version_?_?|版本|バージョン|버전|versi[oó]ne?))?"
    r"[ =:'\",(]{0,24}v?([12]\.\d{1,2}\.\d{1,2}[a-z0-9.+]{0,40})",
)
_CUDA = (
    r"cuda used to build pytorch: {0,4}(\d{1,2}\.\d{1,2})",
    r"torch\.version\.cuda[ =:'\"]{0,4}(\d{1,2}\.\d{1,2})",
    r"nccl version 2[0-9.]{1,8}\+cuda(\d{1,2}\.\d{1,2})",
)
_DRIVER = (
    r"nvidia driver version: {0,4}(\d{3}\.\d{1,3}(?:\.\d{1,3})?)",
    r"driver version: {0,4}(\d{3}\.\d{1,3}(?:\.\d{1,3})?)",
    r"nvrm version: .{0,80} (\d{3}\.\d{1,3}(?:\.\d{1,3})?) ",
    r"\b(?:nvidia[ -])?driver(?: version)?[ :=v]{1,4}(\d{3}\.\d{1,3}(?:\.\d{1,3})?)\b",
)
_NCCL = (r"nccl version:? {0,2}(2\.\d{1,2}\.\d{1,2})",)
_CUBLAS = (r"\b(?:lib)?cublas(?:lt)?(?:\.so\.| version| |=)[ :=]{0,3}(1[1-3]\.\d{1,2}\.\d{1,2}\.\d{1,3})\b",)
_DISTRIBUTION = r"\b(%s)(?:==| {1,40}|[ :=]{1,3}(?:version[ :=]{1,3})?)v?(\d{1,3}\.\d{1,3}[a-z0-9.]{0,20})"
_CAPABILITY = r"cuda capability (?:sm_)?(\d{1,2})\.?(\d)\b"
_ARCHES = r"install supports cuda capabilities sm_"
_RANGE = r"^\s{0,8}\((\d\.\d)\) - \(\d{1,2}\.\d\)"
_WORLD = r"\b(?:world[_ -]?size|nranks|n_ranks|num_processes)[ =:'\"]{1,4}(\d{1,5})\b"
_RANKS = (
    (r"\bnproc[-_]per[-_]node[ =:'\"]{1,4}(\d{1,5})\b", 0),
    (r"\bgpu (\d{1,2}): nvidia", 1),
    (r"\[rank ?(\d{1,5})\]", 1),
)
_PARTS = r"tried to allocate (?P<tried>[0-9.]{1,8} [kmg]i?b)"
_UNUSED = r"(?P<unused>[0-9.]{1,8} [kmg]i?b) is reserved by pytorch but unallocated"
_OLD = r"(?P<allocated>[0-9.]{1,8} [kmg]i?b) already allocated;.{0,80}; (?P<reserved>[0-9.]{1,8} [kmg]i?b) reserved"
_FREE = r"(?P<free>[0-9.]{1,8} [kmg]i?b|0 bytes) (?:is )?free"
_HELD = r"(?P<held>[0-9.]{1,8} [kmg]i?b) is allocated by pytorch"
_TOTAL = r"(?:total capacity of |gpu \d{1,3}; )(?P<total>[0-9.]{1,8} [kmg]i?b)"
_OWN = r"this process has (?P<own>[0-9.]{1,8} [kmg]i?b) memory in use"
_UNITS = {"k": 2**-20, "m": 2**-10, "g": 1.0}


@dataclass(frozen=True)
class Reading:
    """`told`: words of signatures.py that hold; `first`: who failed first, None where nobody is named; `works`: how
    far the ranks came; `error`: what Python ended with, None where no exception is in the log; `more_gpus`: there may
    be more than those that are seen; `stated`: the libraries whose versions the log names itself, and not its torch."""

    situation: Situation
    told: frozenset[str]
    first: Failure | None
    works: Works
    error: Line | None
    more_gpus: bool
    stated: frozenset[str]


def read(log: Log) -> Reading:
    first, (situation, stated) = ranks.first(log), _situation(log)
    told = {*_memory(log), *(["rank-failed-first"] if first and ranks.by_itself(log, first) else [])}
    if _below(log, situation):
        told.add("card-below-torch")
    return Reading(
        situation, frozenset(told), first, ranks.works(log, situation.gpu_count), _error(log), _count(log)[1], stated
    )


def _situation(log: Log) -> tuple[Situation, frozenset[str]]:
    """With the libraries of its torch, and which of all its libraries the log names itself."""
    said = {"torch": _value(log, _TORCH), "cuda": _value(log, _CUDA)}
    torch, cuda = _torch(said["torch"], said["cuda"])
    release = facts.torch_release(torch) if torch else None
    distributions = _distributions(log)
    stated = {**facts.libraries_among(distributions, cuda), **_libraries(log)}
    words: dict[str, set[str]] = {"environment": set(), "features": set(), "extensions": set()}
    for word in signatures.words():
        if log.has(word.lines) and not log.has(word.unless):
            words[word.kind].add(word.word)
    found = Situation(
        gpus=_gpus(log),
        torch=torch,
        cuda=cuda or (release.cuda if release else None),
        libraries={**(facts.libraries_of(release) if release else {}), **stated},
        distributions=distributions,
        driver=_value(log, _DRIVER),
        gpu_count=_count(log)[0],
        **{kind: frozenset(told) for kind, told in words.items()},
    )
    return found, frozenset(stated)


def _torch(said: str | None, cuda: str | None) -> tuple[str | None, str | None]:
    """The distribution's version and its CUDA: what imports as 2.3.1+cu121 is the index's 2.3.1 where that has 12.1."""
    try:
        version = Version((said or "").rstrip(".+"))
    except InvalidVersion:
        return None, cuda
    local = re.fullmatch(r"cu(\d{2})(\d)", version.local or "")
    cuda = cuda or (f"{local[1]}.{local[2]}" if local else None)
    release = facts.torch_release(version.public)
    plain = release is not None and cuda in (None, release.cuda) and (version.local is None or local is not None)
    if plain or version.local is not None:
        return (version.public if plain else str(version)), cuda
    label = "" if cuda is None or release is None else f"+cu{cuda.replace('.', '')}"
    return f"{version.public}{label}", cuda


def _value(log: Log, patterns: Sequence[str]) -> str | None:
    for pattern in patterns:
        for _, match in log.find(compiled(pattern), 1):
            return match[1].rstrip(".")
    return None


def _distributions(log: Log) -> dict[str, str]:
    """Those that an advisory asks for, and CUDA's libraries."""
    asked = {name for advisory in facts.advisories() for match in advisory.match for name in match.distributions}
    carried = {name for row in facts.libraries().values() for name in row.distributions.values()} - {"torch"}
    found: dict[str, str] = {}
    for name in sorted(asked | carried):
        pattern = compiled(_DISTRIBUTION % re.escape(name).replace(r"\-", "[-_]"))
        for _, match in log.find(pattern, 1):
            found[name] = match[2].rstrip(".")
    return found


def _libraries(log: Log) -> dict[str, str]:
    said = {"nccl": _value(log, _NCCL), "cublas": _value(log, _CUBLAS)}
    return {name: version for name, version in said.items() if version}


def _gpus(log: Log) -> tuple[Gpu, ...]:
    """Those that the log is of: not one on which it says that all went well."""
    names = {name.lower(): gpu for gpu in facts.gpus().values() for name in _called(gpu)}
    found: dict[str, Gpu] = {}
    lines = log.find(_models(), 50)
    for line, _ in lines:
        for match in _models().finditer(line.text):
            if not signatures.elsewhere(line.text[: match.start()], line.text[match.end() :]):
                gpu = names[re.sub(r"\s+", " ", match[1].lower())]
                found[gpu.id] = gpu
    if not lines:
        told = [f"{match[1]}.{match[2]}" for _, match in log.find(compiled(_CAPABILITY), 20)]
        told += [card.compute_capability for card in signatures.cards() if log.has([card.pattern])]
        found = {capability: _unlisted(capability) for capability in told}
    return tuple(found.values())


def _below(log: Log, situation: Situation) -> bool:
    """Whether torch has code for newer cards and none for one of these, by what it printed or by its release."""
    cards = [Version(gpu.compute_capability) for gpu in situation.gpus]
    for _, match in log.find(compiled(_RANGE), 1):
        return any(card < Version(match[1]) for card in cards)
    release = facts.torch_release(situation.torch) if situation.torch else None
    arches = [Version(arch) for arch in (release.arch_list if release else ())]
    for line, _ in log.find(compiled(_ARCHES), 1):
        arches = [Version(f"{arch[:-1]}.{arch[-1]}") for arch in re.findall(r"sm_(\d{2,3})", line.text)]
    return any(
        card < max(arches, default=card) and not any(a.major == card.major and a.minor <= card.minor for a in arches)
        for card in cards
    )


def _called(gpu: Gpu) -> Iterator[str]:
    """As drivers print it, and as people write it: H20, RTX 4090. Two characters (T4, L4) mean anything else too."""
    yield from gpu.all_names
    short = re.sub(r"^(rtx)(pro)?", lambda m: "rtx pro " if m[2] else "rtx ", gpu.id)
    if len(short) > 2:
        yield short
        yield short.replace(" ", "")
    yield f"nvidia {short}"
    yield f"tesla {short}"


@cache
def _models() -> re.Pattern[str]:
    names = sorted({name for gpu in facts.gpus().values() for name in _called(gpu)}, key=len, reverse=True)
    return compiled("(?<![a-z0-9_-])(" + "|".join(map(re.escape, names)) + ")(?![a-z0-9])")


def _unlisted(capability: str) -> Gpu:
    return Gpu(
        id=UNLISTED, names=(UNLISTED,), family=UNLISTED, compute_capability=capability, memory_gb=(),
        features=frozenset(), first_cuda="11.0", datacentre=False, source=(UNLISTED,), status="unconfirmed",
        as_of="2026-11",
    )  # fmt: skip


def _count(log: Log) -> tuple[int | None, bool]:
    """GPUs that work together, where the log says or shows that there are several, and whether there may be more."""
    said = [int(match[1]) for _, match in log.find(compiled(_WORLD), 50)]
    seen = [int(match[1]) + more for pattern, more in _RANKS for _, match in log.find(compiled(pattern), 50)]
    # the highest rank that has a line is not the last one
    return max((count for count in said or seen if count > 1), default=None), not said


_RAISED = (
    r"^(?:\[rank ?\d{1,5}\]:? ?)?(?:[a-z_][\w.]{0,120}\.)?[a-z_]\w{0,60}(?:error|exception|interrupt|exit)"
    r"(?:: .{0,2000})?$"
)
_LAUNCHER = r"childfailederror|calledprocesserror"


def _error(log: Log) -> Line | None:
    """What Python ended with: the last line that an exception's name begins."""
    lines = [line for line, _ in log.find(compiled(_RAISED), TRIED, [compiled(_LAUNCHER)])]
    return lines[-1] if lines else None


def _memory(log: Log) -> Iterator[str]:
    """Whether what torch holds unused would have been enough, and whether others hold more than torch does."""
    for line, match in log.find(compiled(_PARTS), 20):
        sizes = {"tried": _gib(match["tried"])}
        for pattern in (_UNUSED, _OLD, _TOTAL, _FREE, _HELD, _OWN):
            told = compiled(pattern).search(line.text)
            sizes |= {name: _gib(text) for name, text in told.groupdict().items()} if told else {}
        unused = sizes.get("unused", sizes.get("reserved", 0.0) - sizes.get("allocated", 0.0))
        own = sizes.get("own", sizes.get("reserved", sizes.get("held", 0.0) + unused))
        if unused >= sizes["tried"]:
            yield "fragmented"
        if own and "total" in sizes and sizes["total"] - sizes.get("free", 0.0) - own > max(own, sizes["tried"]):
            yield "memory-of-others"


def _gib(text: str) -> float:
    number, unit = text.split()
    try:
        return float(number) * _UNITS.get(unit[0].lower(), 0.0)
    except ValueError:
        return 0.0
