"""Writes the page of a campaign: benchmarks/results/injections.md."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import model, statistics
from .records import MASKED, PARTIAL, STOPPED, WHOLE, CleanRun, Record

_MOST_ESCAPES, _MOST_ALARMS = 25, 20


@dataclass(frozen=True)
class Campaign:
    """All measurements of a campaign. For each probe: the injections, the clean runs, and the seconds that the probe
    takes in a complete run at level standard. `control`: the injections into the probe operations with a broken
    comparison."""

    machine: str
    torch: str
    seconds: Mapping[str, float]
    injections: Mapping[str, Sequence[Record]]
    control: Sequence[Record]
    clean: Mapping[str, Sequence[CleanRun]]


def page(campaign: Campaign) -> list[str]:
    everything = [record for records in campaign.injections.values() for record in records]
    found, large = statistics.detected(everything), statistics.detected_large(everything)
    alarms = [run for runs in campaign.clean.values() for run in runs if run.faults]
    passes = min(map(len, campaign.clean.values()), default=0)
    lines = [
        "# Detection rate of the self-test under a fault model",
        "",
        f"Machine: {campaign.machine}. Made by `make injections` with torch {campaign.torch}, on the CPU, with the",
        "probes of level standard: nothing of it has run on a GPU, and every figure holds under this model only.",
        "",
        f"- {len(everything)} injections into the probes' own operations, one in a run.",
        f"- Of the {found.count} that can escape, {_shown(found)} were detected, in all probes together.",
        f"- Of the {large.count} of these that move a result by more than {statistics.LARGE} units of its largest",
        f"  element, {_shown(large)} were detected.",
        f"- At least {passes} clean runs of every probe, each with other settings: {_alarms(alarms)}.",
    ]
    sections = (
        _method(),
        _by_probe(campaign),
        _by_fault(everything),
        _by_bits(everything),
        _escapes(campaign),
        _control(campaign),
        _clean(campaign),
        _not_covered(),
    )
    return [*lines, *itertools.chain(*sections)]


def _shown(share: statistics.Share) -> str:
    if not share.count:
        return "-"
    low, high = share.interval
    return f"{100 * share.value:.2f}% ({100 * low:.2f} to {100 * high:.2f})"


def _alarms(alarms: Sequence[CleanRun]) -> str:
    return f"{len(alarms)} with a false alarm" if alarms else "no false alarm"


def _paragraph(text: str) -> list[str]:
    return ["", *textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)]


def _items(*texts: str) -> list[str]:
    wrapped = (
        textwrap.wrap(
            " ".join(text.split()), 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
            break_on_hyphens=False,
        )
        for text in texts
    )  # fmt: skip
    return ["", *(line for lines in wrapped for line in lines)]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


_MODEL = """
A fault changes values in one way (kind) at one set of places (place), which are drawn independently of each other.
Sources: T is the abstract of Tung et al., "The Anatomy of Silent Data Corruption: GPU Error Pattern Study and Modeling
Guidance", arXiv 2605.04213. Q is figures of the same paper as three public repositories quote them, one of which marks
them as unverified: of the paper itself only the first page could be read. N is the list of faults of NVIDIA's fault
injector NVBitFI. A is assumed, as no figure was found.
Bits are drawn uniformly. Integers have no NaN. The tables by kind, place and bit let a reader apply other shares.
"""
_INJECTION = """
An injection draws a case of the probe, one of all elements that the case's operators compute, intermediate products
included (both with equal probability), and a fault. The probe's own code runs the case, with that operator's output
changed as it returns, and judges it. Inputs and references, which the host makes, are left out.
"""
_MASKED = """
no element of any result moves by more than rounding may move it: by the largest error of a run without a fault,
relative to the tolerance, or by one rounding of the value; not at all where results are exact.
"""
_WHOLE = """
all elements of some result move. No sampling could miss that, so detecting it proves little. A result of one
element is always of this kind.
"""
_STOPPED = "the probe ended with an exception or a signal, which a user would notice too."
_PARTIAL = """
the rest. The detected share is of these alone. A result is what the probe has before it picks elements to compare:
what its samples leave out counts as missed.
"""
_TOLERANCE = """
A tolerance holds for every right algorithm, while "masked" is measured against one, on this machine. So part of what
counts as missed is what another algorithm, or a tensor core that truncates, may give. Large ones are those that move a
result by more than {} units in the last place of its largest element, which no right algorithm is expected to do.
"""


def _method() -> Iterator[str]:
    yield from ("", "## The model")
    yield from _paragraph(_MODEL)
    for title, shares in (("kind", model.KINDS), ("place", model.PLACES)):
        rows = [(one.name, f"{100 * one.value:.2f}%", one.source, one.meaning) for one in shares]
        yield from _table([title, "share", "source", "meaning"], rows)
    yield from ("", "## What is counted")
    yield from _paragraph(_INJECTION)
    texts = {MASKED: _MASKED, WHOLE: _WHOLE, STOPPED: _STOPPED, PARTIAL: _PARTIAL}
    yield from _items(*(f"**{outcome}**: {text}" for outcome, text in texts.items()))
    yield from _paragraph(_TOLERANCE.format(statistics.LARGE))
    yield from _paragraph(
        "Intervals are Wilson's, of 95%. Seconds are those of the whole probe in a run of level standard."
    )


def _by_probe(campaign: Campaign) -> Iterator[str]:
    yield from ("", "## By probe")
    rows = []
    for probe, records in campaign.injections.items():
        counts, share = statistics.outcomes(records), statistics.detected(records)
        large = statistics.detected_large(records)
        seconds = campaign.seconds.get(probe)
        rate = f"{100 * share.value / seconds:.1f}%" if seconds and share.count else "-"
        whole = statistics.Share(sum(r.detected for r in records if r.outcome == WHOLE), counts[WHOLE])
        rows.append(
            (
                *(probe, len(records), counts[MASKED], counts[WHOLE], whole.part, counts[STOPPED], counts[PARTIAL]),
                *(_shown(share), f"{_shown(large)} of {large.count}", f"{seconds:.2f}" if seconds else "-", rate),
            )
        )
    head = ["probe", "injections", MASKED, WHOLE, "detected of these", STOPPED, PARTIAL, "detected of these"]
    yield from _table([*head, "detected of large ones", "seconds", "share per second"], rows)
    reported = sum(r.detected for records in campaign.injections.values() for r in records if r.outcome == MASKED)
    yield from _paragraph(f"Masked injections that a probe reported all the same: {reported}.")


def _by_fault(everything: Sequence[Record]) -> Iterator[str]:
    yield from ("", "## By kind and place")
    kinds = statistics.grouped(everything, lambda record: record.kind)
    rows = []
    for kind in (share.name for share in model.KINDS):
        places = statistics.grouped(kinds.get(kind, []), lambda record: record.place)
        shares = [statistics.detected(places.get(place.name, [])) for place in model.PLACES]
        rows.append((kind, *(f"{_shown(share)} of {share.count}" for share in shares)))
    yield from _table(["detected of those that can escape", *(place.name for place in model.PLACES)], rows)


def _by_bits(everything: Sequence[Record]) -> Iterator[str]:
    yield from ("", "## By bit and dtype")
    yield from _paragraph('Faults of "one bit" and "two adjacent bits" in floating-point numbers, by the highest bit.')
    fields = statistics.grouped((r for r in everything if r.bits), lambda record: record.bits)
    yield from _table(
        ["bit", MASKED, PARTIAL, "detected of these"],
        [
            (name, statistics.outcomes(records)[MASKED], share.count, _shown(share))
            for name, records in sorted(fields.items())
            for share in [statistics.detected(records)]
        ],
    )
    dtypes = statistics.grouped(everything, lambda record: record.dtype)
    yield from _table(
        ["dtype of the output", "injections", PARTIAL, "detected of these"],
        [
            (name, len(records), share.count, _shown(share))
            for name, records in sorted(dtypes.items())
            for share in [statistics.detected(records)]
        ],
    )


def _escapes(campaign: Campaign) -> Iterator[str]:
    yield from ("", "## What escapes most")
    found = [
        (share.count - share.part, probe, operator, share)
        for probe, records in campaign.injections.items()
        for operator, those in statistics.grouped(records, lambda record: record.operator).items()
        for share in [statistics.detected(those)]
        if share.part < share.count
    ]
    found.sort(key=lambda one: -one[0])
    yield from _table(
        ["probe", "operator", "missed", "detected of those that can escape"],
        [(probe, operator, missed, _shown(share)) for missed, probe, operator, share in found[:_MOST_ESCAPES]],
    )


def _control(campaign: Campaign) -> Iterator[str]:
    yield from ("", "## Control")
    right = statistics.detected(campaign.injections.get("operations", ()))
    broken = statistics.detected(campaign.control)
    yield from _paragraph(
        f"""The same injections into operations, judged by a comparison that was broken on purpose (it leaves out every
        second element): {_shown(broken)} of {broken.count} detected, instead of {_shown(right)}."""
    )


def _clean(campaign: Campaign) -> Iterator[str]:
    yield from ("", "## Clean runs")
    yield from _paragraph(
        """A CPU repeats a run bit for bit, so repeating one says nothing new. The runs differ in what decides the order
        of summation: the instructions that torch, oneDNN and MKL may use, one or two threads, and by how many elements
        inputs are moved in memory; and in the level, the first that has the probe, or standard. References are computed
        once for each configuration. `make clean-runs` counts runs with other seeds."""
    )
    groups: dict[tuple[str, str, int], list[CleanRun]] = {}
    for run in itertools.chain(*campaign.clean.values()):
        groups.setdefault((run.configuration, run.level, run.threads), []).append(run)
    rows = [(*key, len(found), sum(bool(run.faults) for run in found)) for key, found in sorted(groups.items())]
    yield from _table(["instructions", "level", "threads", "runs of a probe", "false alarms"], rows)
    alarms = [(probe, run) for probe, runs in campaign.clean.items() for run in runs if run.faults]
    if alarms:
        yield from _items(*(f"{probe}, {run.configuration}: {run.faults[0]}" for probe, run in alarms[:_MOST_ALARMS]))


def _not_covered() -> Iterator[str]:
    yield from ("", "## Not covered")
    yield from _items(
        """env.*, hw.health, perf.* and own.script compute no results of their own. init.alloc and dist.staged compute
        in processes of their own, and so does a part of repeat, which compares calls with each other. The code of
        compile.triton is not an operator of aten. large, attention.efficient, attention.cudnn and graph.replay are
        skipped on the CPU, norm.apex and optim.apex without apex.""",
        """Each fault is in one output of one call. A defective GPU may be wrong in many calls, which is easier to
        detect, or once in hours, which only burn (level full) waits for.""",
        "Faults strike what an operator of aten returns, not the sums inside a kernel.",
    )
