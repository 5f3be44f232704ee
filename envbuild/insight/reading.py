"""What a log says of where it comes from: versions, GPUs, driver, and which rank failed first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from packaging.version import InvalidVersion, Version

from envbuild.insight import ranks, versions
from envbuild.insight.logs import TRIED, Line, Log, compiled
from envbuild.insight.ranks import Failure, Works
from envbuild.insight.versions import Versions
from envbuild.plan import facts, signatures
from envbuild.plan.advisories import UNLISTED, Gpu, Situation

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
TORCHES = 3
"""Versions of torch that one log may be of."""
_UNITS = {"k": 2**-20, "m": 2**-10, "g": 1.0}


@dataclass(frozen=True)
class Reading:
    """`told`: words of signatures.py that hold; `first`: who failed first, None where nobody is named; `works`: how
    far the ranks came; `error`: what Python ended with, None where no exception is in the log; `more_gpus`: there may
    be more than those that are seen; `stated`: the libraries whose versions the log names itself, and not its torch.

    `situations`: one for each combination of the versions that may be meant; `situation`: what they agree on;
    `candidates`: the versions on which they do not, of torch and of libraries. `loaded`: the libraries whose loaded
    version the log shows."""

    situation: Situation
    situations: tuple[Situation, ...]
    candidates: Mapping[str, tuple[str, ...]]
    told: frozenset[str]
    first: Failure | None
    works: Works
    error: Line | None
    more_gpus: bool
    stated: frozenset[str]
    loaded: frozenset[str]


def read(log: Log) -> Reading:
    first, said = ranks.first(log), versions.read(log)
    situations = tuple(_situations(log, said))
    situation = _common(situations)
    told = {*_memory(log), *(["rank-failed-first"] if first and ranks.by_itself(log, first) else [])}
    if _below(log, situation):
        told.add("card-below-torch")
    return Reading(
        situation, situations, _candidates(situations, situation), frozenset(told), first,
        ranks.works(log, situation.gpu_count), _error(log), _count(log)[1],
        frozenset(said.libraries(situation.cuda)) & frozenset(situation.libraries), frozenset(said.loaded),
    )  # fmt: skip


def _situations(log: Log, said: Versions) -> Iterator[Situation]:
    """With the libraries that each torch brings, where the log has no other version of them."""
    words: dict[str, set[str]] = {"environment": set(), "features": set(), "extensions": set()}
    for word in signatures.words():
        if log.has(word.lines) and not log.has(word.unless):
            words[word.kind].add(word.word)
    bare = Situation(
        gpus=_gpus(log),
        driver=said.driver,
        gpu_count=_count(log)[0],
        environment=frozenset(words["environment"]),
        features=frozenset(words["features"]),
        extensions=frozenset(words["extensions"]),
    )
    torches = dict.fromkeys(_torch(version, said.cuda) for version in said.torch or (None,))
    labelled = {torch.partition("+")[0] for torch, _ in torches if torch and "+" in torch}
    for torch, cuda in [found for found in torches if found[0] not in labelled][:TORCHES]:
        release = facts.torch_release(torch) if torch else None
        brought = facts.libraries_of(release) if release else {}
        built = replace(bare, torch=torch, cuda=cuda or (release.cuda if release else None))
        for libraries in versions.combinations(said.libraries(cuda)):
            for others in versions.combinations(said.others):
                yield replace(built, libraries=brought | libraries, distributions=others)


def _common(situations: Sequence[Situation]) -> Situation:
    first = situations[0]
    return replace(
        first,
        torch=_agreed([found.torch for found in situations]),
        cuda=_agreed([found.cuda for found in situations]),
        libraries=dict(
            item for item in first.libraries.items() if all(item in o.libraries.items() for o in situations)
        ),
        distributions=dict(
            item for item in first.distributions.items() if all(item in o.distributions.items() for o in situations)
        ),
    )


def _agreed(values: Sequence[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None


def _candidates(situations: Sequence[Situation], common: Situation) -> dict[str, tuple[str, ...]]:
    known = [{**({"torch": found.torch} if found.torch else {}), **found.libraries} for found in situations]
    agreed = {*common.libraries, *(["torch"] if common.torch else [])}
    names = dict.fromkeys(name for versions in known for name in versions if name not in agreed)
    return {name: tuple(dict.fromkeys(found[name] for found in known if name in found)) for name in names}


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
