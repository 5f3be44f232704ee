"""Runs the campaigns of faults: `make chaos`. Writes benchmarks/results/chaos.md.

python tests/chaos/campaign.py [--count N] [--seed N] [CAMPAIGN]...   as root; starts an engine of its own
python tests/chaos/campaign.py --report FILE...                       what earlier runs wrote with --json, as one result
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parent), str(_HERE.parents[1] / "benchmarks")]

from machine import described, write  # noqa: E402

from chaos import isolation, place, registries, report, rounds  # noqa: E402
from chaos.engines import Engines  # noqa: E402
from chaos.indexes import Indexes  # noqa: E402
from chaos.kills import Kills  # noqa: E402
from chaos.rounds import Campaign, Ran  # noqa: E402

# How many faults each has at least.
COUNTS = {"kill": 200, "engine": 40, "registry": 40, "index": 40}


def main() -> int:
    asked = _asked()
    if asked.report:
        return _publish([Ran.read(json.loads(file.read_text(encoding="utf-8"))) for file in asked.report])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is under way is cleaned up
    names = asked.names or list(COUNTS)
    place.stock()
    with tempfile.TemporaryDirectory(prefix="envbuild-chaos-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        program = registries.program(Path(folder) / "packages") if "registry" in names else None
        if "registry" in names and not program:
            sys.exit("no docker-registry is installed, and there is no Debian to fetch it from")
        isolation.leave_network()
        kinds: dict[str, Callable[[], Campaign]] = {
            "kill": Kills,
            "engine": Engines,
            "registry": lambda: registries.Registries(program or Path()),
            "index": Indexes,
        }
        ran = [_run(kinds[name](), Path(folder) / name, asked.count or COUNTS[name], asked.seed) for name in names]
    if asked.json:
        (one,) = ran
        asked.json.write_text(json.dumps(asdict(one), indent=1), encoding="utf-8")
    elif not asked.names and not asked.count:  # a part of it is no result
        return _publish(ran)
    return 1 if any(one.breaches for one in ran) else 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="faults of each campaign")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what came of one campaign, for --report")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("names", nargs="*", metavar="CAMPAIGN", help=f"all without any: {', '.join(COUNTS)}")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(COUNTS))
    if unknown:
        parser.error(f"there is no campaign {unknown[0]!r}")
    if asked.json and len(asked.names) != 1:
        parser.error("--json is for one campaign")
    lacking = None if asked.report else isolation.lacking()
    if lacking:
        parser.error(lacking)
    return asked


def _run(campaign: Campaign, folder: Path, count: int, seed: int) -> Ran:
    print(f"{campaign.name}: {count} faults, seed {seed}", file=sys.stderr, flush=True)
    try:
        with place.place(folder) as there:
            return rounds.run(campaign, there, count, seed)
    finally:
        campaign.close()


def _publish(ran: list[Ran]) -> int:
    write("chaos", report.lines(ran, described()))
    return 1 if any(one.breaches for one in ran) else 0


if __name__ == "__main__":
    sys.exit(main())
