"""Run the fault campaigns: `make chaos`. Writes benchmarks/results/chaos.md.

python tests/chaos/campaign.py [--count N] [--seed N] [CAMPAIGN]...  as root; starts an engine of its own
python tests/chaos/campaign.py --report FILE [--report FILE]...       what earlier runs wrote with --json, as one result
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parent), str(_HERE.parents[1] / "benchmarks")]

from e2e import engines, openregistry  # noqa: E402
from machine import described, write  # noqa: E402
from options import positive, program  # noqa: E402

from chaos import engines as engine_kills  # noqa: E402
from chaos import isolation, place, products, registries, report, rounds  # noqa: E402
from chaos.engines import Engines  # noqa: E402
from chaos.indexes import Indexes  # noqa: E402
from chaos.kills import BUILD, MAKE, STARTS, Kills  # noqa: E402
from chaos.place import Place  # noqa: E402
from chaos.products import CPU, GPU, Product  # noqa: E402
from chaos.rounds import Campaign, Ran  # noqa: E402

# The minimum number of faults of each campaign.
COUNTS = {"kill": 200, "engine": 40, "registry": 40, "index": 40, "gpu": 12}
# The number in the tests.
SLICE = {"kill": 1, "engine": 1, "registry": 1, "index": 1, "gpu": 0}
# The maximum number, for campaigns in which a fault takes minutes.
MOST = {"gpu": 30}
PRODUCTS = {"gpu": GPU}  # all others: CPU
_BEGINNINGS = {"kill": MAKE.shares, "gpu": BUILD.shares, "engine": engine_kills.SHARES}
_FREE = {"gpu": 30e9}  # bytes: what a build of the image requires in addition to two images and the builder's cache
_FOLDER = Path("/var/tmp")


def main() -> int:
    arguments = _arguments()
    if arguments.report:
        return _publish([one for file in arguments.report for one in _read(file)])
    counts = _counts(arguments.names or COUNTS, arguments.count, SLICE if arguments.slice else COUNTS)
    short = _short_of_room(counts)
    if short:
        sys.exit(short)
    ran: list[Ran] = []
    with tempfile.TemporaryDirectory(prefix="envbuild-chaos-", dir=_FOLDER, ignore_cleanup_errors=True) as folder:
        stocked = {
            one.extends: products.stock_with_stand_ins(Path(folder) / "index")
            if arguments.slice and one == CPU
            else (one, products.stock(one))
            for one in (CPU, GPU)
            if one in map(_product, counts)
        }
        program = openregistry.program(Path(folder) / "packages") if "registry" in counts else None
        if "registry" in counts and not program:
            sys.exit("docker-registry is not installed, and it can only be downloaded on Debian")
        isolation.leave_network()
        kinds: dict[str, Callable[[], Campaign]] = {
            "kill": lambda: Kills(starts=arguments.starts),
            "engine": lambda: Engines(starts=arguments.starts),
            "registry": lambda: registries.Registries(program or Path()),
            "index": Indexes,
            "gpu": lambda: Kills(starts=arguments.starts, name="gpu", moments=BUILD),
        }
        for product, names in itertools.groupby(counts, _product):
            with place.place(Path(folder) / "place", *stocked[product.extends]) as there:
                for name in names:
                    keep = functools.partial(_keep, arguments.json, tuple(ran))  # keep finished campaigns if cut short
                    ran.append(_run(kinds[name](), there, counts[name], arguments.seed, keep))
    if not arguments.json and not arguments.names and counts == COUNTS:  # a partial campaign is not a result
        return _publish(ran)
    return 1 if any(one.breaches for one in ran) else 0


def _counts(names: Iterable[str], count: int | None, usual: Mapping[str, int]) -> dict[str, int]:
    """Return how many faults each campaign injects here; campaigns without faults are left out."""
    found = {name: min(count or usual[name], MOST.get(name, sys.maxsize)) for name in names}
    return {name: found[name] for name in names if usual[name] and found[name]}


def _short_of_room(names: Iterable[str]) -> str | None:
    """Return why a campaign is not started (too little disk space); None if there is enough for all."""
    free = shutil.disk_usage(_FOLDER).free
    for name in names:
        if free < _FREE.get(name, 0):
            return (
                f"the campaign {name} needs {_FREE[name] / 1e9:.0f} GB free in {_FOLDER}, {free / 1e9:.1f} GB are: "
                "free some (envbuild prune; docker buildx prune), or name the other campaigns alone"
            )
    return None


def _product(name: str) -> Product:
    return PRODUCTS.get(name, CPU)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=positive, help="faults of each campaign; gpu has 30 at most")
    parser.add_argument("--slice", action="store_true", help="a few of each")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same faults")
    parser.add_argument(
        "--starts", action="append", choices=STARTS, default=[], metavar="START",
        help=f"kill, engine, gpu: begin rounds so; may be repeated, all without any: {', '.join(STARTS)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="what came of it, for --report")
    parser.add_argument(
        "--report", type=Path, action="append", metavar="FILE", help="write the result of it; may be repeated"
    )
    parser.add_argument("names", nargs="*", metavar="CAMPAIGN", help=f"all without any: {', '.join(COUNTS)}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(COUNTS))
    if unknown:
        parser.error(f"unknown campaign {unknown[0]!r}")
    if arguments.report and arguments.names:
        parser.error("--report makes a result of files, and runs no campaign")
    for name in arguments.names or COUNTS:
        if arguments.starts and name in _BEGINNINGS and not set(arguments.starts) & set(_BEGINNINGS[name]):
            parser.error(f"--starts: no round of {name} begins so; its: {', '.join(_BEGINNINGS[name])}")
    lacking = None if arguments.report else engines.lacking()
    if lacking:
        parser.error(lacking)
    return arguments


def _run(campaign: Campaign, there: Place, count: int, seed: int, keep: Callable[[Ran], None]) -> Ran:
    print(f"{campaign.name}: {count} faults, seed {seed}", file=sys.stderr, flush=True)
    try:
        return rounds.run(campaign, replace(there), count, seed, keep)  # a copy: campaigns may change the settings
    finally:
        campaign.close()


def _keep(file: Path | None, before: tuple[Ran, ...], one: Ran) -> None:
    if file:
        file.write_text(json.dumps([asdict(each) for each in (*before, one)], indent=1), encoding="utf-8")


def _read(file: Path) -> list[Ran]:
    """Read the JSON document that a run wrote."""
    try:
        found = [Ran.read(one) for one in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        sys.exit(f"{file} is nothing that --json wrote: {error}")
    return found or sys.exit(f"{file} holds no campaign")


def _publish(ran: list[Ran]) -> int:
    write("chaos", report.lines(ran, described(), COUNTS))
    return 1 if any(one.breaches for one in ran) else 0


if __name__ == "__main__":
    program(main)
