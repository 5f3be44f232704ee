"""Measures the time, memory and disk space for building an image with other tools and with envbuild, on one engine in
one run.

python benchmarks/build.py [--runs N] [--only CASE ...]   writes benchmarks/results/build.{md,json,svg}

Needs Debian, root and dockerd (make engine). The benchmark starts a separate engine, and empties only that one. All
tools download from an index on this machine, whose wheels are downloaded once into --folder and stay there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import rest
import stock as stocks
import table
from arena import Arena
from machine import RESULTS, described
from mirror import Mirror
from options import positive, program
from registry import Registry
from rounds import Rounds
from stock import PINS, Stock
from ways import Dockerfile, Ours, Way, ways

CASES = (
    "builds", "direct", "here", "engine", "plain", "link", "lock", "commands", "shared", "pulls", "containerd",
    "proved",
)  # fmt: skip
# Cases that need the wheels or the image of the first pin to exist already.
_BUILT = {"here", "engine", "link", "commands"}
_DISK = 4 << 30
_FOLDER = Path("/var/tmp/envbuild-bench")
_MARK = ".envbuild-bench"  # a file that marks a folder other than _FOLDER as used by this benchmark
_PARTS = (
    "base", "cache", "compiled", "config", "containerd", "contexts", "engine", "layout", "locks", "plain", "project",
    "proved", "registry", "shared", "state",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs",
        type=positive,
        default=3,
        help="number of runs of each case; a tool that takes longer than a minute runs once",
    )
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=f"only these of: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=table.TITLES,
        metavar="WAY",
        help=f"envbuild, and these of: {', '.join(table.TITLES)}",
    )
    parser.add_argument(
        "--folder", type=Path, default=_FOLDER, help="new or empty folder of the run, or that of an earlier run, "
        "whose wheels are used again",
    )  # fmt: skip
    arguments = parser.parse_args()
    if not _may_use(arguments.folder):
        parser.error(f"{arguments.folder} has files that this benchmark did not write, and would remove some of them")
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {text}", file=sys.stderr, flush=True)

    loads = [os.getloadavg()[0]]
    found, facts, cut = _measured(arguments.folder, arguments.runs, arguments.only, arguments.ways, say)
    loads.append(os.getloadavg()[0])
    run = {"machine": described(), "load": loads, "runs": arguments.runs, "minutes": (time.monotonic() - begin) / 60}
    before = json.loads((RESULTS / "build.json").read_text(encoding="utf-8")) if _kept(arguments) else {}
    document = {**run, **facts, "cases": found}
    if before:  # the page describes the run of most cases, and then this one
        cases = _merged(before["cases"], found)
        document = {**before, "cases": cases, "again": {**before.get("again", {}), ", ".join(arguments.only): run}}
    table.write(document)
    if cut:
        raise cut


def _measured(
    folder: Path, runs: int, only: list[str], wanted: list[str] | None, say: Any
) -> tuple[dict[str, Any], dict[str, Any], BaseException | None]:
    """Measure, and return the values by case, the conditions of the measurement, and the reason if the benchmark ended
    early."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    _clean(folder)
    locked, cublas = stocks.kept(folder, say)
    for part in ("project", "registry"):
        (folder / part).mkdir()
    try:
        with (
            Mirror(folder / "wheels") as mirror,
            Registry(folder / "registry") as registry,
            Arena(folder / "engine") as arena,
        ):
            stock = Stock(folder, locked, cublas, mirror, "", "")
            stocks.profiles(stock, say)
            tar = stocks.bases(stock, say)
            pip = next(item.wheel for item in locked if item.wheel.name == "pip")
            say("the peers' base and uv go into the registry")
            base, uv = stocks.images(folder, tar, folder / "wheels" / pip.sha256 / pip.file, arena, registry)
            stock = Stock(folder, locked, cublas, mirror, base, uv)
            rounds = Rounds(arena, stock, registry, say)
            facts = {
                "engine": arena.docker("version", "--format", "{{.Server.Version}}").strip(),
                "wheels": len(locked), "fetched": sum(item.bytes for item in locked), "base": tar.stat().st_size,
                **rest.disk(folder, _DISK), "pins": PINS,
            }  # fmt: skip
            chosen = [way for way in ways(arena, stock) if not wanted or way.name in (*wanted, "envbuild")]
            cut: BaseException | None = None
            try:
                _cases(rounds, chosen, runs, only)
            except (Exception, KeyboardInterrupt, SystemExit) as error:  # keep the measurements made so far
                cut, facts["cut_short"] = error, repr(error)
            return rounds.found, facts, cut
    finally:
        _clean(folder)


def _cases(rounds: Rounds, all_ways: list[Way], runs: int, only: list[str]) -> None:
    ours = next(way for way in all_ways if isinstance(way, Ours))
    uv = next((way for way in all_ways if isinstance(way, Dockerfile) and way.name == "uv"), None)
    if "builds" not in only and _BUILT & set(only):
        ours.build(PINS[0])
    for number in range(runs):
        for way in all_ways:
            if "builds" in only and (number == 0 or not way.slow):
                rounds.one(way, number)
        if "here" in only:
            rounds.here(ours)
        if "direct" in only:
            rounds.without_engine(ours, number)
    if "plain" in only:
        for _ in range(runs):
            rest.plain(rounds)
    if "link" in only:
        rest.slow_link(rounds, ours)
    if "commands" in only:
        rest.audit(rounds, ours)
        for _ in range(runs):
            rest.commands(rounds)
    if "engine" in only:  # empties the engine
        for _ in range(runs):
            rounds.loaded(ours)
    if "shared" in only:
        rounds.shared(ours)
    if "pulls" in only and uv:
        rounds.pulled(ours, uv)
    if "lock" in only:
        rest.locks(rounds, rounds.stock.folder / "locks")
    if "proved" in only:
        rounds.arena.empty()
        rest.proved(rounds)
    if "containerd" in only and uv:
        rounds.arena.stop()
        with Arena(rounds.stock.folder / "containerd", containerd=True) as arena:
            rounds.with_engine(arena).containerd(Ours(arena, rounds.stock), replace(uv, arena=arena))


def _kept(arguments: argparse.Namespace) -> bool:
    """Whether to keep the values of an earlier run together with the new ones."""
    return set(arguments.only) < set(CASES) and (RESULTS / "build.json").is_file()


def _merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Replace the values of each case and way that were measured again."""
    return {case: {**before.get(case, {}), **found.get(case, {})} for case in {**before, **found}}


def _may_use(folder: Path) -> bool:
    """Whether `_clean` would remove only files of this benchmark, and not, for example, `cache` in a home folder."""
    return folder == _FOLDER or not folder.exists() or (folder / _MARK).is_file() or not any(folder.iterdir())


def _clean(folder: Path) -> None:
    """Remove the files that a run creates in the folder, except the wheels."""
    for part in _PARTS:
        shutil.rmtree(folder / part, ignore_errors=True)


if __name__ == "__main__":
    program(main)
