"""Every probe on every simulated GPU, every seeded fault, and every tolerance: `make pretend`, 20 minutes on 2 cores.

python tests/pretend/campaign.py [--side 2]      writes benchmarks/results/pretend.md; exit 1 if anything is wrong
python tests/pretend/campaign.py --probe NAME    runs one probe at level standard on every simulated GPU; writes no file

The probes run with their real sizes on two GPUs, to measure the memory that they need: on the H100, which has every
kernel, and on the T4, which lacks most kernels and has the least memory. The other GPUs differ in which kernels they
have, so small sizes suffice there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

import torch  # noqa: E402
from machine import described, write  # noqa: E402
from options import program  # noqa: E402
from selftest.reading import Frame  # noqa: E402
from selftest.seeds.on_gpus import PROBES as SEEDS  # noqa: E402
from selftest.tensor_cores import CORES  # noqa: E402

from envbuild.facts import probe_catalogue_reader  # noqa: E402
from pretend import expected, launch, sweep  # noqa: E402
from pretend.gpus import GPUS  # noqa: E402
from pretend.sizes import SHORT  # noqa: E402

NAMES = list(probe_catalogue_reader.known_probes())
ASKED = ["burn", "memory", "fingerprint"]  # in addition to level standard; dist.nodes needs several machines
REAL_SIZES = ("h100", "t4")
GB = 1e9

Found = Mapping[str, Frame]


def healthy(
    gpu: str, level: str, folder: Path, variables: Mapping[str, str], probes: Sequence[str] | None = None
) -> Found:
    require = ASKED if level == "standard" and probes is None else []
    given = launch.document(gpu, level, NAMES, probes, require=require)
    sizes = {} if gpu in REAL_SIZES else {SHORT: "1"}
    return launch.run(gpu, launch.CATALOGUE, given, folder / f"{gpu}-{level}", **variables, **sizes)


def seeded(folder: Path, variables: Mapping[str, str]) -> Found:
    given = launch.document("h100", "quick", [probe.name for probe in SEEDS])
    return launch.run("h100", launch.SEEDS, given, folder / "seeds", **variables, **{SHORT: "1"})


def peak(found: Found, probe: str) -> float:
    return float(found[probe]["traits"]["simulated"]["peak_bytes"]) / GB


def row_of_gpu(gpu: str, found: Found) -> str:
    model, sizes = GPUS[gpu], "real" if gpu in REAL_SIZES else "small"
    passed = sum(frame["status"] == "passed" for frame in found.values())
    skipped = ", ".join(sorted(set(found) & expected.skipped(gpu)))
    host = sum(frame["traits"]["simulated"]["host_seconds"] for frame in found.values())
    capability = "{}.{}".format(*model.capability)
    return f"| {model.name} | {capability} | {model.gigabytes} GB | {sizes} | {passed} | {skipped} | {host:.0f} s |"


def rows_of_peaks(found: Mapping[tuple[str, str], Found]) -> Iterator[str]:
    for name in NAMES:
        cells = []
        for level in ("quick", "standard"):
            peaks = [peak(found[gpu, level], name) for gpu in REAL_SIZES if name in found[gpu, level]]
            cells.append(f"{max(peaks):.2f} GB" if peaks else "-")
        yield f"| {name} | {cells[0]} | {cells[1]} |"


def rows_of_tolerances() -> Iterator[tuple[str, bool]]:
    """Yield a row for each generation and product, and whether the result is as expected."""
    for generation, kind in sweep.cases():
        lengths = [sweep.healthy_ratio(generation, kind, k) for k in sweep.LENGTHS]
        shapes = [sweep.healthy_ratio(generation, kind, 256, shape) for shape in sweep.SHAPES]
        wrong = [sweep.wrong_ratio(generation, kind, k) for k in sweep.LENGTHS]
        good = max(lengths + shapes) < 0.7 and min(wrong) > 1
        yield f"| {generation} {kind} | {max(lengths + shapes):.2f} | {min(wrong):.1f} |", good
    for generation in CORES:
        ratio = max(sweep.split_ratio(generation, slices, k) for slices in sweep.SLICES for k in (256, 1024, 4096))
        yield f"| {generation} fp16, split-K in half precision | {ratio:.2f} | |", ratio < 0.7
    for generation, kind in sweep.cases():
        if kind in ("fp16", "bf16"):
            ratio = max(sweep.attention_ratio(generation, kind, *size) for size in ((128, 64), (365, 128)))
            wrong_core = sweep.wrong(generation, kind)
            low = min(sweep.attention_ratio(generation, kind, length, 64, wrong_core) for length in (128, 365))
            yield f"| {generation} attention {kind} | {ratio:.2f} | {low:.1f} |", ratio < 0.7 and low > 1


def one_probe(name: str, side: int) -> int:
    """Run one probe on every simulated GPU and print its result on each. Returns 1 after a false alarm."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(side) as pool:
        variables = launch.variables(Path(folder))
        runs = {gpu: pool.submit(healthy, gpu, "standard", Path(folder), variables, [name]) for gpu in GPUS}
        found = {gpu: run.result() for gpu, run in runs.items()}
    for gpu, run in found.items():
        print(f"{gpu}: {run[name]['status']}, {peak(run, name):.2f} GB")
    alarms = [text for gpu, run in found.items() for text in expected.alarms(gpu, "standard", run)]
    print("\n".join(alarms) if alarms else "no false alarm")
    return 1 if alarms else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Every probe and seeded fault on every simulated GPU.")
    parser.add_argument("--side", type=int, default=2, help="runs side by side")
    single = [name for name in NAMES if name != "dist.nodes"]
    parser.add_argument("--probe", choices=single, metavar="NAME", help="run only this probe, and write no results")
    arguments = parser.parse_args()
    side = arguments.side
    if arguments.probe:
        return one_probe(arguments.probe, side)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(side) as pool:
        folder = Path(name)
        variables = launch.variables(folder)
        faults = pool.submit(seeded, folder, variables)
        standard = [(gpu, "standard") for gpu in (*REAL_SIZES, *(set(GPUS) - set(REAL_SIZES)))]
        keys = [*standard, *((gpu, "quick") for gpu in REAL_SIZES)]
        runs = {key: pool.submit(healthy, *key, folder, variables) for key in keys}
        found = {key: run.result() for key, run in runs.items()}
        caught = faults.result()
    torch.set_num_threads(side)
    tolerances = list(rows_of_tolerances())
    alarms = [text for (gpu, level), run in found.items() for text in expected.alarms(gpu, level, run)]
    missed = list(expected.missed(caught))
    problems = [
        *alarms,
        *missed,
        *(f"no expectation of {seed}" for seed in sorted(expected.unjudged(list(caught)))),
        *(row for row, good in tolerances if not good),
    ]
    wrong = set(caught) & set(expected.WRONG_ON_GPUS)
    write(
        "pretend",
        [
            "# The self-test on simulated GPUs",
            "",
            f"Machine: {described()}. Made by `make pretend`, on the CPU: nothing of it has run on a GPU.",
            "`tests/pretend/__init__.py` describes what is as on a GPU, and what is not.",
            "",
            f"- Runs of a probe on a healthy GPU: {sum(map(len, found.values()))}; false alarms: {len(alarms)}.",
            f"- Seeded faults caught on the paths for GPUs (H100): {len(wrong) - len(missed)} of {len(wrong)}; right "
            f"kernels that pass: {len(set(caught) & expected.RIGHT_ON_GPUS)}.",
            f"- Time: {(time.monotonic() - begin) / 60:.0f} min, {side} runs side by side.",
            *(f"- WRONG: {text.splitlines()[0]}" for text in problems),
            "",
            "Host: processor time of level standard without what the GPU would compute, on one core.",
            "",
            "| GPU | capability | memory | sizes | passed | skipped | host |",
            "|---|---|---|---|---|---|---|",
            *(row_of_gpu(gpu, found[gpu, "standard"]) for gpu in GPUS),
            "",
            "The most memory that each probe's tensors take (the larger of H100 and T4), without the context and the",
            "libraries' workspaces. init.alloc holds 90% of what is free by design, as burn and memory do at level",
            "full: here these two are small.",
            "",
            "| probe | quick | standard |",
            "|---|---|---|",
            *rows_of_peaks(found),
            "",
            "Ratio of error to tolerance of emulated tensor cores: the largest of healthy cores, without the rounding "
            f"of the result (k = {', '.join(map(str, sweep.LENGTHS))}, several shapes), and the smallest of cores with "
            "an accumulator of half precision. The ratios of attention include its roundings.",
            "",
            "| product | healthy | wrong accumulator |",
            "|---|---|---|",
            *(row for row, _ in tolerances),
        ],
    )
    return 1 if problems else 0


if __name__ == "__main__":
    program(main)
