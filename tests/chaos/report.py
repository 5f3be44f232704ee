"""The result of the campaigns as Markdown. Pure functions."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from chaos.invariant import HALF, LEFT, WRONG
from chaos.rounds import NONE, Outcome, Ran

_WHAT = {
    "kill": "SIGKILL for envbuild in `make`",
    "gpu": "SIGKILL for envbuild in `build` of a GPU image",
    "engine": "SIGKILL for the engine in `make`",
    "registry": "SIGKILL for the registry",
    "index": "a faulty package index in `lock` and `make`",
}
# The states from which a round begins (kills.STARTS).
_STARTS = {
    "switch": "the profile changed to one whose image is there and proved",
    "relock": "the profile changed to one whose image is not there; its layers may be in the builder's cache",
    "layer": "as relock, and the layer that differs is made again",
    "reprove": "the image is there, and its self-test never ran",
    "fetch": "as relock, and the small wheels are fetched again",
    "base": "as relock, and the base is made again",
    "cold": "as relock, and every layer is made again (`--no-cache`)",
}
_EFFECT = "- an effect: a file changed, a program started, or the engine asked"


def lines(ran: Sequence[Ran], machine: str, wanted: Mapping[str, int]) -> list[str]:
    """Return the report. `wanted`: how many faults each campaign injects if it is not ended early."""
    outcomes = [outcome for one in ran for outcome in one.outcomes]
    seeds = ", ".join(f"{one.name} {len(_struck(one))} from seed {one.seed}" for one in ran)
    return [
        "# Faults survived",
        "",
        f"Machine: {machine}. Made by `make chaos` ({seeds}) in {sum(one.seconds for one in ran) / 60:.0f} min of",
        "rounds, on a machine that did other work too. The profile is `cpu`, level quick; in `gpu` it is `step-video`,",
        "5.5 GB, with one of two cuBLAS, and is only built, without a GPU. The engine is private.",
        "",
        "A round is one fault, then a run without one. After both it is looked at from without: is every image that is",
        "called verified proved by evidence for exactly its digest; is every lock, Dockerfile, record, statement and",
        "stored file whole and of its hash. After the second also: did it complete, with the image that the lock gave",
        "before, and without a container, temporary image, folder, file or process left of the first. If the engine",
        "was killed, the image may differ, if its layers have the same content and envbuild reported it.",
        "",
        "| | after the fault | after the next run |",
        "|---|---|---|",
        *(f"| {kind} | {_count(outcomes, kind, 'after the fault')} | {_count(outcomes, kind, 'after the next')} |"
          for kind in (WRONG, HALF, LEFT)),
        f"| did not end as it may | {_ended(outcomes, 'the run under it')} | {_ended(outcomes, 'the next run')} |",
        *_others(outcomes),
        *_short(ran, wanted),
        *_words(outcomes),
        *(line for name in _WHAT for line in _table(name, [one for one in ran if one.name == name])),
        "",
        *(_faults(outcomes) or ["No fault is left."]),
    ]  # fmt: skip


def _others(outcomes: Iterable[Outcome]) -> list[str]:
    count = sum(outcome.others for outcome in outcomes)
    return (
        ["", f"Images with the same files that replaced another image, as envbuild reported: {count}."] if count else []
    )


def _short(ran: Sequence[Ran], wanted: Mapping[str, int]) -> Iterator[str]:
    for name, most in wanted.items():
        had = sum(len(_struck(one)) for one in ran if one.name == name)
        if had < most:
            yield from ("", f"Cut short: {name} had {had} of {most} faults.")


def _words(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Explain the names of moments that occur; those of other campaigns need no explanation."""
    found = {outcome.struck.where.partition(",")[0] for outcome in outcomes}
    means = [f"- `{name}`: {words}" for name, words in _STARTS.items() if name in found]
    if means:
        yield from ("", "What a round of a killed envbuild or engine begins with (`where`), and what an effect is:", "")
        yield from (*means, _EFFECT)


def _struck(ran: Ran) -> list[Outcome]:
    """Return the outcomes without runs that failed before a fault was injected; those are reported separately."""
    return [outcome for outcome in ran.outcomes if outcome.struck.kind != NONE]


def _count(outcomes: Iterable[Outcome], *words: str) -> int:
    return sum(all(word in breach for word in words) for outcome in outcomes for breach in outcome.breaches)


def _ended(outcomes: Iterable[Outcome], whose: str) -> int:
    """Return the number of violations by a run itself: these begin with `whose`; other violations begin with the time
    when they were found."""
    return sum(breach.startswith(whose) for outcome in outcomes for breach in outcome.breaches)


def _table(name: str, ran: Sequence[Ran]) -> Iterator[str]:
    outcomes = [outcome for one in ran for outcome in _struck(one)]
    if not outcomes:
        return
    kinds: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        kinds[(outcome.struck.kind, _place(name, outcome.struck.where))].append(outcome)
    yield from ("", f"## {_WHAT[name]}: {len(outcomes)}", "")
    yield "| fault | where | times | ended with | the next run | its seconds: median, most |"
    yield "|---|---|---|---|---|---|"
    for (kind, where), found in sorted(kinds.items()):
        ended, again = (_codes(codes) for codes in ((o.struck.code for o in found), (o.next_code for o in found)))
        seconds = [outcome.next_seconds for outcome in found]
        spent = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
        yield f"| {kind} | {where} | {len(found)} | {ended} | {again} | {spent} |"
    messages = Counter(_shape(outcome.struck.message) for outcome in outcomes if outcome.struck.message)
    if messages:
        yield from ("", "Messages:", "")
        yield from (f"- {times} times: {words}" for words, times in messages.most_common())


def _place(name: str, where: str) -> str:
    """Shorten the description of a moment for the table: leave out milliseconds."""
    parts = where.split(", ")
    if name == "index":
        return where
    return parts[0] if name in ("kill", "gpu", "engine") else "back at once, or after up to 20 s"


def _codes(codes: Iterable[int]) -> str:
    return ", ".join(f"{'killed' if code == -9 else code}: {times}" for code, times in sorted(Counter(codes).items()))


_VARYING = (
    (r"127\.0\.0\.1:\d+", "HOST"),
    (r"/r[0-9a-f]{8,}", "/NAME"),
    (r"unix://\S+", "SOCKET"),
    (r"/var/tmp/\S+", "FILE"),
    (r"[0-9a-f]{12,}", "..."),
)


def _shape(message: str) -> str:
    """Remove the parts of a message that differ from round to round."""
    for pattern, instead in _VARYING:
        message = re.sub(pattern, instead, message)
    return message[:300].replace("\n", " ")


def _faults(outcomes: Iterable[Outcome]) -> list[str]:
    return [f"- {o.struck.kind}, {o.struck.where}: {_shape(breach)}" for o in outcomes for breach in o.breaches]
