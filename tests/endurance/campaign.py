"""The campaign: `make endurance`. Each part writes its own section of benchmarks/results/endurance.md.

python tests/endurance/campaign.py [PART...]     without any: all of them, one after the other
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from e2e.engines import lacking, own_engine  # noqa: E402
from e2e.support import machine_cache  # noqa: E402
from machine import described  # noqa: E402
from options import positive, program  # noqa: E402

from endurance import full, memory, soak, together  # noqa: E402
from endurance.disks import disk, usable  # noqa: E402

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "endurance.md"
HEAD = "# Endurance: full disks, no memory, many at once, again and again"
UID = 41234  # of the second user: an unused id


def say(text: object) -> None:
    print(text, file=sys.stderr, flush=True)


def disks(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """Run each step that writes to a disk with this disk full."""
    with ExitStack() as stack:
        engine_disk = stack.enter_context(disk(folder / "engine", 8 << 30))
        small = stack.enter_context(disk(folder / "disk", 3 << 30))
        own = stack.enter_context(own_engine(engine_disk.folder / "data"))
        rounds = full.steps(full.Site(folder, own, small, engine_disk), arguments.only or full.every(), say)
    return _full("the disk of a place is filled to its last block when the step begins", rounds)


def commands(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """Run every command that writes to the project with the project's disk full."""
    with disk(folder / "disk", 64 << 20) as small:
        rounds = full.commands(full.Site(folder, None, small, small), say)
    return _full("the project's disk is filled to its last block before the command runs", rounds)


def _full(how: str, rounds: Sequence[full.Round]) -> tuple[list[str], int]:
    sound = [one.code for one in rounds if not one.faults]
    faults = len(rounds) - len(sound)
    rows = [f"| {one.place} | {one.step} | {one.code} | {_cell(one.faults)} |" for one in rounds]
    ended = ", ".join(f"{one.place}/{one.step}" for one in rounds if one.ended)
    return [
        f"{len(rounds)} rounds: {how}.",
        f"{sound.count(6)} ended with exit code 6, which disk and its figures; {sound.count(0)} write nothing there,",
        "and ended well. Then there is room, and the same command is run again. Looked for: half-written files,",
        f"changed evidence, containers, a wrong `verified`, tracebacks. Rounds with a fault: {faults}.",
        "",
        "| full disk | step or command | exit code | faults |",
        "|---|---|---|---|",
        *rows,
        *(["", f"The engine itself ended in: {ended}. It was started again when there was room."] if ended else []),
    ], faults


def _cell(faults: Sequence[str]) -> str:
    return "; ".join(faults).replace("|", "/").replace("\n", " ") or "-"


def no_memory(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """Run a build step, the audit and a probe with too little memory."""
    why = memory.limitable()
    if why:
        return [f"Not tried: {why}."], 0
    rounds = memory.run(folder, say)
    rows = [
        f"| {one.what} | {one.limit} | {one.code} | {one.message} | {'; '.join(one.faults) or '-'} |" for one in rounds
    ]
    head = ["| who has too little | limit | exit code | message | faults |", "|---|---|---|---|---|"]
    return [*head, *rows], sum(bool(one.faults) for one in rounds)


def crowds(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """Run eight processes on four profiles that change meanwhile."""
    with own_engine(folder / "data") as own:
        many = together.crowd(folder, own.host, secrets.token_hex(3), 8, 4, arguments.seconds)
    return _crowded(many, len(many.makes), many.tested, len(many.refused)), len(many.faults)


def _crowded(many: together.Crowd, made: int, tested: int, refused: int) -> list[str]:
    return [
        f"{many.processes} processes made {many.profiles} profiles for {many.seconds:.0f} s, each changing its profile",
        f"before every other make: {made} makes ended verified, {refused} were refused by their self-test; {tested}",
        f"self-tests ran, each of which left its evidence; {many.waits} makes waited for another; the slowest took",
        f"{many.slowest:.0f} s. Faults (no end, lost evidence, a wrong `verified`, leftovers): {len(many.faults)}.",
        *(f"- {fault}" for fault in many.faults),
    ]


def two_users(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """Run two users on one engine, with a profile of the same name and another profile each."""
    why = together.may_share(UID)
    if why:
        return [f"Not tried: {why}."], 0
    with own_engine(folder / "data") as own:
        users = [together.user(folder, uid, machine_cache("wheels").parent) for uid in (0, UID)]
        group = Path(own.host.removeprefix("unix://")).stat().st_gid
        two = together.two(folder, own.host, secrets.token_hex(3), users, arguments.rounds, group)
    return [
        f"Two users (uid 0 and {UID}; homes, caches and states of their own) made a profile of the same name and one",
        f"of their own at once, {arguments.rounds} times, {two.seconds:.0f} s: {len(two.makes)} makes ended verified,",
        f"{two.tested} with a self-test of their own. Faults: {len(two.faults)}.",
        *(f"- {fault}" for fault in two.faults),
    ], len(two.faults)


def soaking(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """Run `make` of cpu repeatedly with nothing changed."""
    with own_engine(folder / "data") as own:
        rows = soak.run(soak.unchanged(folder, own, arguments.makes), say)
    return _grown("nothing changed", rows, 10)


def pinning(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], int]:
    """Run `make` of a profile whose pin changes each time; old images are pruned after each."""
    with own_engine(folder / "data") as own:
        rows = soak.run(soak.changed(folder, own, arguments.changes), say)
    return _grown(f"the pin of a package another each time, of {len(soak.PINS)}", rows, 2 * len(soak.PINS))


def _grown(what: str, rows: Sequence[soak.Seen], settled: int) -> tuple[list[str], int]:
    grows = soak.growing(rows, settled)
    if grows is None:
        return [f"{len(rows)} makes, {what}: too few to say what grows, for the first {settled} settle."], 0
    return [*soak.table(what, rows, settled), "", *(grows or ["Nothing grows."])], len(grows)


_COUNTED = ("seconds", "rounds", "makes", "changes")  # with a smaller value of one of them, no result is written

Part = Callable[[Path, argparse.Namespace], tuple[list[str], int]]
PARTS: Mapping[str, tuple[str, Part]] = {
    "disks": ("A disk that is full at a step", disks),
    "commands": ("A disk that is full for a command", commands),
    "memory": ("No memory left", no_memory),
    "together": ("Many at once", crowds),
    "users": ("Two users of one engine", two_users),
    "soak": ("Again and again", soaking),
    "pins": ("Again and again, with another pin", pinning),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=positive, default=600, help="of the eight processes")
    parser.add_argument("--rounds", type=positive, default=5, help="of two users")
    parser.add_argument("--makes", type=positive, default=200, help="where nothing changed")
    parser.add_argument("--changes", type=positive, default=20, help="of a pin")
    parser.add_argument(
        "--only",
        action="append",
        choices=full.every(),
        metavar="PLACE/STEP",
        help="of disks",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all without any: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.parts) - set(PARTS))
    why = usable() or lacking()
    if unknown or why:
        parser.error(f"unknown part {unknown[0]!r}" if unknown else str(why))
    if arguments.only and arguments.parts not in ([], ["disks"]):
        parser.error("--only is of the part disks")
    few = arguments.only or any(getattr(arguments, name) < parser.get_default(name) for name in _COUNTED)
    faults = 0
    for part in ["disks"] if arguments.only else arguments.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="endure-", ignore_cleanup_errors=True) as name:
            begin = time.time()
            lines, bad = PARTS[part][1](Path(name), arguments)
            faults += bad
            if few:  # a partial campaign is not a result
                print("\n".join(lines))
                continue
            section(PARTS[part][0], part, [*lines, "", f"It took {(time.time() - begin) / 60:.0f} minutes."])
    return 1 if faults else 0


def section(title: str, part: str, lines: Sequence[str]) -> None:
    """Replace the section of one part in the page; the other sections stay."""
    text = RESULT.read_text(encoding="utf-8") if RESULT.is_file() else ""
    found = {block.partition("\n")[0]: block.partition("\n")[2].strip("\n") for block in text.split("\n## ")[1:]}
    made = f"Machine: {described()}, which did other work too. Made by `make endurance PARTS={part}`."
    found[title] = "\n".join([made, "", *lines])
    order = [known for known, _ in PARTS.values() if known in found]
    RESULT.write_text("\n".join([HEAD, *(f"\n## {one}\n\n{found[one]}" for one in order)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    program(main)
