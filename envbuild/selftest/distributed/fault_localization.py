"""Determines what is faulty if distributed stages fail: a GPU, a link between GPUs, NCCL, or the image.

A stage runs one set of ranks with one backend and one set of NCCL settings. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from envbuild.selftest.distributed.nccl_log import NcclLog

# A failed stage is repeated with each of these groups of settings. NCCL uses SHM only where it cannot use P2P, so SHM
# is disabled only together with P2P. Disabling P2P may also disable NVLS, which uses the same links. Therefore NVLS is
# also disabled alone. If the stage then passes, the cause is NVLS, even if the stage passes with the other settings
# too.
RETRIES = (
    ("NCCL_P2P_DISABLE=1",),
    ("NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"),
    ("NCCL_NVLS_ENABLE=0",),
)
_P2P, _SHM, _NVLS = RETRIES
_BLAMED = (
    (_NVLS, "it passes with NVLS disabled: the cause is NVLS (NVLink SHARP: fabric manager, driver or NCCL)"),
    (_P2P, "it passes with P2P disabled: the cause is P2P (NVLink or PCIe between the GPUs: ACS, IOMMU or driver)"),
    (_SHM, "it passes with P2P and SHM disabled: the cause is SHM (/dev/shm is too small, or not shared)"),
)


@dataclass(frozen=True)
class StageFault:
    """The failure of a rank.

    `member`: the number of its GPU, or of its process on the CPU. `step`: the step that failed. `kind`: one of
    probe_outcome_and_figures.FAILURES.
    """

    rank: int
    member: int
    step: str
    kind: str
    reason: str
    signal: str | None = None


@dataclass(frozen=True)
class Stage:
    """A stage that was run.

    `members`: the GPUs, or the processes on the CPU. `faults`: the faults of the ranks that caused the stage to fail,
    the earliest first; empty if the stage passed.
    """

    backend: str
    members: tuple[int, ...]
    settings: tuple[str, ...] = ()
    faults: tuple[StageFault, ...] = ()
    seconds: float = 0.0
    log: NcclLog = field(default_factory=NcclLog)

    @property
    def name(self) -> str:
        """The name of the stage, such as "nccl 0+2 NCCL_P2P_DISABLE=1"."""
        return " ".join([self.backend, "+".join(map(str, self.members)), *self.settings])


@dataclass(frozen=True)
class StageVerdict:
    """The localised fault.

    `layer`: "nccl" (NCCL fails, gloo does not), "gloo" (gloo fails, NCCL does not) or "image" (every tested backend
    fails). `place`: "card" (one or several GPUs), "link" (between two GPUs), "pairs" (only some pairs of GPUs),
    "together" (only more than two GPUs together) or "everywhere". `workaround`: NCCL settings with which the failed
    stage passes.
    """

    layer: str
    place: str
    text: str
    workaround: str | None = None


def localize_faults(stages: Sequence[Stage], capabilities: Mapping[int, str]) -> StageVerdict | None:
    """Localise the fault that made stages fail; None if no stage failed.

    `capabilities` maps each member to the compute capability of its GPU. It is empty on the CPU, where only gloo is
    tested.
    """
    main = "nccl" if any(stage.backend == "nccl" for stage in stages) else "gloo"
    tried = [stage for stage in stages if stage.backend == main and not stage.settings]
    gloo = {stage.members: stage for stage in stages if stage.backend == "gloo"}
    failed = [stage for stage in tried if stage.faults]
    if not failed:
        if not any(stage.faults for stage in gloo.values()):
            return None
        return StageVerdict("gloo", "everywhere", "nccl passes and gloo fails: gloo, or the loopback network")
    unit = "GPU" if capabilities else "process"
    place, where = _place(tried, unit)
    layer, says = _layer(main, failed, gloo, place)
    workaround, blamed = _workaround(stage for stage in stages if stage.settings)
    unequal = inequality(capabilities)
    texts = [where, says, *([blamed] if blamed else []), *([unequal] if unequal else [])]
    return StageVerdict(layer, place, "; ".join(texts), workaround)


def inequality(capabilities: Mapping[int, str]) -> str | None:
    """Return a sentence if the GPUs differ in compute capability, else None."""
    kinds = sorted(set(capabilities.values()))
    if len(kinds) < 2:
        return None
    groups = [f"{kind} ({_named('GPU', (m for m in capabilities if capabilities[m] == kind))})" for kind in kinds]
    return "the GPUs differ in compute capability: " + ", ".join(groups)


def _place(tried: Sequence[Stage], unit: str) -> tuple[str, str]:
    """Return the place of the fault and a sentence about it, derived from stages with one, two and more members."""
    alone, pairs = ([stage for stage in tried if len(stage.members) == size] for size in (1, 2))
    lame = [stage.members[0] for stage in alone if stage.faults]
    broken = [stage.members for stage in pairs if stage.faults]
    if lame and len(lame) == len(alone):
        return "everywhere", f"each {unit} fails even alone" if len(lame) > 1 else f"the {unit} fails even alone"
    if lame:
        return "card", f"{_named(unit, lame)} {'fail' if len(lame) > 1 else 'fails'} even alone, the others do not"
    if not broken:
        sizes = " and ".join(str(len(stage.members)) for stage in tried if stage.faults)
        return "together", f"each {unit} works alone and in pairs, but {sizes} together fail: topology, or a limit"
    shared = set(broken[0]).intersection(*broken[1:])
    if len(broken) == 1 and len(pairs) > 1:
        return "link", f"only the pair {_named(unit, broken[0])} fails: the link between them, or one of the two"
    if len(broken) > 1 and shared:
        return "card", f"every failing pair contains {_named(unit, shared)}: it or its links are faulty"
    if len(broken) == len(pairs):
        return "everywhere", f"each {unit} works alone, but every pair fails"
    return "pairs", "only some pairs fail: " + ", ".join("+".join(map(str, pair)) for pair in broken)


def _layer(main: str, failed: Sequence[Stage], gloo: Mapping[tuple[int, ...], Stage], place: str) -> tuple[str, str]:
    """Return the layer of the fault and a sentence about it, derived from gloo's stages with the same members."""
    if main == "gloo":
        return "image", "gloo needs no GPU: the image, or the code"
    twins = [gloo[stage.members] for stage in failed if stage.members in gloo]
    if any(twin.faults for twin in twins):
        both = "nccl and gloo both fail"
        return "image", f"{both}: that GPU" if place == "card" else f"{both}: the image, the driver, or the code"
    passes = "nccl fails and gloo passes" if twins else "nccl fails and gloo was not tried"
    alone = any(len(stage.members) == 1 for stage in failed)
    return "nccl", f"{passes}: {'NCCL itself' if alone else 'NCCL, P2P or topology'}, not the project's code"


def _workaround(retried: Iterable[Stage]) -> tuple[str | None, str | None]:
    passing = {stage.settings: not stage.faults for stage in retried}
    for settings, text in _BLAMED:
        if passing.get(settings):
            return " ".join(settings), text
    return None, "disabling transports does not help: NCCL itself, the driver, or a GPU" if passing else None


def _named(unit: str, members: Iterable[int]) -> str:
    return " and ".join(f"{unit} {member}" for member in sorted(members))
