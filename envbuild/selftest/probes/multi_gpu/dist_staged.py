"""dist.staged: one process for each GPU: each alone, in pairs, then in larger groups. The groups run over NCCL. For
comparison, all GPUs together and the smallest group that failed also run over gloo.

The probe detects faults such as those of Amphion and Step-Video: each GPU works alone, but with several GPUs processes
die of SIGSEGV (open-mmlab/Amphion#167). The probe's own process does not use CUDA, because the ranks are forked from
it, and CUDA does not work in a forked process whose parent has used CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from envbuild.selftest.distributed import fault_localization, nccl_log, rank_processes_and_faults
from envbuild.selftest.distributed.fault_localization import Stage, StageVerdict
from envbuild.selftest.distributed.rank_processes_and_faults import Tried, World
from envbuild.selftest.distributed.rank_program import FIGURE, LEFT_OUT, RATE
from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.probe_context import Context, missing_gpu
from envbuild.selftest.harness.probe_outcome_and_figures import Skip

CAP = 30.0  # time limit of a stage in seconds
BUDGET = 300.0  # seconds after which no further stage begins
PROCESSES = 4  # on the CPU, in place of one process for each GPU


def rounds(members: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return all pairs, grouped into rounds in which each member has at most one partner (a tournament by the circle
    method)."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]))
        found.append([tuple(sorted((a, b))) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def growing(members: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the first 4, 8, 16, ... members, and finally all members; an empty list for two members or fewer."""
    sizes = [size for size in (4 << shift for shift in range(16)) if size < len(members)]
    return [tuple(members[:size]) for size in (*sizes, len(members)) if size > 2]


class StagedRun:
    """A staged run: its members (GPUs, or processes on the CPU), and the results so far."""

    def __init__(self, context: Context, cards: Sequence[Mapping[str, Any]]) -> None:
        self.context = context
        self.cards = cards
        self.capabilities = {number: str(card["compute_capability"]) for number, card in enumerate(cards)}
        self.members = tuple(range(len(cards) or PROCESSES))
        self.tried: list[Tried] = []
        self.left_out: list[str] = []
        self._end = time.monotonic() + BUDGET

    def stages(self, backend: str) -> list[Stage]:
        """Return the stages that were run over this backend without changed settings, in the order in which they were
        run (smaller worlds first)."""
        return [tried.stage for tried in self.tried if tried.stage.backend == backend and not tried.stage.settings]

    def walk(self, backend: str) -> None:
        """Run each member alone; then run the members that passed alone in pairs and in ever larger groups."""
        self._try(backend, [(member,) for member in self.members])
        lame = {stage.members[0] for stage in self.stages(backend) if stage.faults}
        able = [member for member in self.members if member not in lame]
        for groups in (*(rounds(able) if len(able) > 1 else ()), *([group] for group in growing(able))):
            self._try(backend, groups)

    def localise(self) -> None:
        """Run all GPUs and the smallest failed NCCL world over gloo. If that failed world has more than one member, run
        it also over NCCL with each of the settings in RETRIES, which disable transports."""
        failed = [stage.members for stage in self.stages("nccl") if stage.faults][:1]
        for members in dict.fromkeys((*failed, self.members)):
            self._try("gloo", [members])
        for members in failed:
            for settings in fault_localization.RETRIES if len(members) > 1 else ():
                self._try("nccl", [members], settings)

    def _try(self, backend: str, groups: Sequence[tuple[int, ...]], settings: tuple[str, ...] = ()) -> None:
        """Run several worlds at the same time, or leave them out if no time is left. The worlds must have no members in
        common."""
        names = ", ".join(Stage(backend, members, settings).name for members in groups)
        if time.monotonic() > self._end:
            self.left_out.append(names)
            return
        self.context.step(names)
        worlds = [World(backend, members, settings) for members in groups]
        self.tried += rank_processes_and_faults.run_worlds(worlds, self.context.job.device, CAP)


def dist_staged(context: Context) -> None:
    """dist.staged: processes alone, in pairs and together exchange data, sum and train, exact to the last bit."""
    if not torch.distributed.is_available():
        raise Skip(f"torch {torch.__version__} is built without torch.distributed")
    site = StagedRun(context, [] if context.on_cpu else visible_gpus(context))
    if context.on_cpu:
        import_ahead()
        site.walk("gloo")
    else:
        site.walk("nccl")
        site.localise()
    _tell(site)
    _judge(site)
    missing = _missing(site)
    if missing and not context.faults:
        raise Skip(missing)


def visible_gpus(context: Context) -> list[dict[str, Any]]:
    """Return the visible GPUs, listed by a separate process. This process must not call CUDA, because its forked ranks
    use CUDA."""
    context.step("visible GPUs")
    ending = forked_work.run_forked(_look, CAP)
    if ending.reported.get("missing"):
        raise Skip(str(ending.reported["missing"]))
    if ending.failure:
        raise RuntimeError(f"the GPUs could not be listed: {ending.failure}")
    return [dict(card) for card in ending.reported["cards"]]


def _look(tell: forked_work.Tell) -> None:
    tell("missing", missing_gpu())
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    tell("cards", [_card(item) for item in found])


def _card(found: Any) -> dict[str, Any]:
    uuid = getattr(found, "uuid", None)  # missing before torch 2.4
    return {
        "name": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "uuid": None if uuid is None else f"GPU-{uuid}",
    }


def import_ahead() -> None:
    """Import once, before forking, what DDP would otherwise import in each rank on first use, which takes 1.5 s (torch
    2.13).

    Not called for GPUs, because such an import may call CUDA.
    """
    with contextlib.suppress(Exception):
        importlib.import_module("torch._dynamo")


def _tell(site: StagedRun) -> None:
    """Report the figures and traits of all stages."""
    for tried in site.tried:
        for case, (dtype, shape, error, seconds) in worst_by_case(tried).items():
            site.context.figure(f"{tried.stage.name} {case}", getattr(torch, dtype), shape, error, 0.0, seconds)
    unequal = fault_localization.inequality(site.capabilities)
    site.context.traits.update(
        stages=[_document(tried.stage) for tried in site.tried],
        cards=list(site.cards),
        card=_joined(str(card["name"]) for card in site.cards),
        compute_capability=_joined(site.capabilities.values()),
        transports=sorted({name for stage in site.stages("nccl") for name in stage.log.transports}),
        nccl=_joined(tried.stage.log.version for tried in site.tried if tried.stage.log.version),
        unequal=unequal,
        unequal_cards="yes" if unequal else "no",
        **rates(site.tried),
    )


def _joined(values: Iterable[str]) -> str | None:
    """Return the distinct values joined by "and", or None if there are none."""
    return " and ".join(sorted(set(values))) or None


def _document(stage: Stage) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "passed": not stage.faults,
        "transports": list(stage.log.transports),
        "seconds": round(stage.seconds, 3),
        "faults": list(map(dataclasses.asdict, stage.faults)),
    }


def worst_by_case(tried: Tried) -> dict[str, tuple[str, list[int], float, float]]:
    """Return, for each case: dtype, shape, and the largest error and longest time of all ranks. NaN counts as the
    largest error."""
    found: dict[str, tuple[str, list[int], float, float]] = {}
    for ending in tried.endings:
        for key in ending.reported:
            if key.startswith(FIGURE):
                dtype, shape, error, seconds = ending.reported[key]
                _, _, worst, longest = found.get(key, (dtype, shape, 0.0, 0.0))
                worst = worst if worst >= error or math.isnan(worst) else error
                found[key] = (dtype, shape, worst, max(seconds, longest))
    return {key[len(FIGURE) :]: row for key, row in found.items()}


def rates(tried: Sequence[Tried]) -> dict[str, dict[str, Any]]:
    """Return as traits the bus bandwidth of each case on its slowest rank, and the reasons why cases were left out."""
    found: dict[str, dict[str, Any]] = {"GB/s": {}, "left_out": {}}
    for one in tried:
        for ending in one.endings:
            for key, value in ending.reported.items():
                for prefix, trait in ((RATE, "GB/s"), (LEFT_OUT, "left_out")):
                    if key.startswith(prefix):
                        case = f"{one.stage.name} {key[len(prefix) :]}"
                        found[trait][case] = min(value, found[trait].get(case, value))
    return found


def _judge(site: StagedRun) -> None:
    """Record the failed stages (NCCL before gloo, then the smallest world first) and the diagnosis from all stages."""
    context = site.context
    stages = [tried.stage for tried in site.tried]
    verdict = fault_localization.localize_faults(stages, site.capabilities)
    if verdict:
        failed = [stage for stage in (*site.stages("nccl"), *site.stages("gloo")) if stage.faults]
        context.traits.update(layer=verdict.layer, place=verdict.place, workaround=verdict.workaround)
        context.traits.update(failed_step=failed[0].faults[0].step)
        for stage in failed:
            _fail(site, stage, verdict if stage is failed[0] else None)
    if site.left_out:
        context.step("stages left out")
        context.fail("hang", f"no time was left after {BUDGET:g} s for " + "; ".join(site.left_out))
    required = context.job.transport
    if required:
        between = [stage for stage in site.stages("nccl") if len(stage.members) > 1 and not stage.faults]
        objection = nccl_log.objection(required, [(stage.name, stage.log) for stage in between])
        if objection:
            context.step("transports")
            context.fail("mismatch", objection)


def _fail(site: StagedRun, stage: Stage, verdict: StageVerdict | None) -> None:
    """Record a failed stage as a fault at the step of the first rank that caused it."""
    first, more = stage.faults[0], stage.faults[1:]
    card = f" (GPU {first.member})" if site.cards else ""
    site.context.step(f"{stage.name}: {first.step}, rank {first.rank}{card}")
    others = f", as did rank {', '.join(str(fault.rank) for fault in more)}" if more else ""
    said = f"rank {first.rank}{card} of {stage.name}: {first.reason}{others}"
    site.context.fail(first.kind, f"{said}; {verdict.text}" if verdict else said, first.signal)


def _missing(site: StagedRun) -> str | None:
    """Return what this machine lacks for the test that the profile requires. Return None if nothing is missing, or on
    the CPU."""
    count, wanted = len(site.cards), site.context.job.gpu_count
    if site.context.on_cpu:
        return None
    if count < wanted:
        return f"{count} GPU{'s' if count > 1 else ''} visible, the profile is for {wanted} that work together"
    if count == 1 and site.context.job.transport:
        return "one GPU is visible: no transport between GPUs could be measured"
    if count == 1:
        site.context.traits["skipped"] = "worlds of two and more: one GPU is visible"
    return None
