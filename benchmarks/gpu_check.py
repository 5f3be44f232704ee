"""The self-test on a real card, all in one go: quick and standard twice each, a fingerprint, and what the machine is.

python benchmarks/gpu_check.py [--out FOLDER]       default: benchmarks/results/gpu; needs torch and a GPU, no Docker

Writes <card>.md and, for each run, its document as JSON. Exit 0 all passed and what must repeat did; 5 if not; 4 no
GPU. The datasheet beside the achieved figures comes from the facts, where envbuild can be imported.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import machine
from options import program

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from selftest import reading

ROOT = Path(__file__).parents[1]
Frame = dict[str, Any]
BUDGET = {"quick": 10, "standard": 60}
# What a probe promises to be the same in every run on one card, among its traits.
REPEATS = {"gemm.exact": ("sha256",), "train.step": ("weights", "losses")}
NO_GPU, FAILED = 4, 5


def expected(name: str) -> dict[str, Any]:
    """The facts of a card, as the job document takes them; {} where they cannot be read or do not know it."""
    try:
        from envbuild.plan import facts
        from envbuild.proof import hardware
    except ImportError as error:
        print(f"no datasheet: {error}", file=sys.stderr)
        return {}
    gpu = facts.gpu_by_name(name)
    sheet = hardware.sheet(gpu.datasheet) if gpu else {}
    return {"datasheets": {name: sheet}} if sheet else {}


def run(level: str, card: str, probes: list[str] | None = None) -> tuple[list[Frame], float]:
    """The frames of one run, and its seconds, torch's import included."""
    document = {
        "version": 1, "nonce": secrets.token_hex(16), "level": level, "device": "cuda", "probes": probes,
        "expect": {"gpus": [card], **expected(card)},
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(document, file)
        file.flush()
        begin = time.monotonic()
        argv = [sys.executable, "-m", "envbuild.selftest", "--job", file.name]
        done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        seconds = time.monotonic() - begin
    return reading.read(done.stdout, str(document["nonce"])), seconds


def differs(first: Mapping[str, Frame], second: Mapping[str, Frame]) -> list[str]:
    """What was promised to repeat, and did not."""
    return [
        f"{probe}: {trait}"
        for probe, traits in REPEATS.items()
        for trait in traits
        if probe in first and first[probe]["traits"].get(trait) != second[probe]["traits"].get(trait)
    ]


def cards() -> list[dict[str, str]]:
    """Name, driver and memory of each card, as nvidia-smi has them."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    rows = [[part.strip() for part in line.split(",")] for line in said.splitlines() if line.count(",") == 2]
    return [{"name": name, "driver": driver, "memory": memory} for name, driver, memory in rows]


def table(runs: Mapping[str, tuple[list[Frame], float]]) -> Iterator[str]:
    yield "| probe | " + " | ".join(f"{name}: s" for name in runs) + " | status | figures, worst error over bound |"
    yield "|---" * (len(runs) + 3) + "|"
    outcomes = {name: reading.outcomes(frames) for name, (frames, _) in runs.items()}
    for probe in dict.fromkeys(probe for found in outcomes.values() for probe in found):
        frames = [found.get(probe) for found in outcomes.values()]
        told = [frame for frame in frames if frame]
        seconds = " | ".join(f"{frame['seconds']:.2f}" if frame else "-" for frame in frames)
        status = ", ".join(dict.fromkeys(frame["status"] for frame in told))
        ratios = [float(figure["ratio"]) for frame in told for figure in frame["figures"]]
        worst = f"{len(told[-1]['figures'])}, {max(ratios):.3g}" if ratios else str(told[-1]["reason"] or "-")
        yield f"| {probe} | {seconds} | {status} | {worst.splitlines()[0].replace('|', '/')} |"


def achieved(frames: list[Frame]) -> Iterator[str]:
    found = reading.outcomes(frames)
    for probe in ("perf.gemm", "perf.memory"):
        if probe in found:
            yield f"- {probe}: `{json.dumps(found[probe]['traits'])}`"


def main() -> int:
    parser = argparse.ArgumentParser(description="The self-test on a real card.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu")
    out = parser.parse_args().out
    there = cards()
    if not there:
        print("no GPU here: nvidia-smi shows none", file=sys.stderr)
        return NO_GPU
    card = there[0]["name"]
    runs = {f"{level} {count}": run(level, card) for level in ("quick", "standard") for count in (1, 2)}
    recorded, took = run("quick", card, ["fingerprint"])
    out.mkdir(parents=True, exist_ok=True)
    stem = card.lower().replace(" ", "-")
    for name, (frames, _) in {**runs, "fingerprint": (recorded, took)}.items():
        told = next((frame for frame in frames if frame["kind"] == "fingerprint"), None)
        text = json.dumps(told if name == "fingerprint" and told else frames, indent=1)
        (out / f"{stem}-{name.replace(' ', '-')}.json").write_text(text + "\n", encoding="utf-8")
    found = {name: reading.outcomes(frames) for name, (frames, _) in runs.items()}
    failed = sorted({p for outcomes in found.values() for p, frame in outcomes.items() if frame["status"] == "failed"})
    apart = [text for level in BUDGET for text in differs(found[f"{level} 1"], found[f"{level} 2"])]
    start = runs["quick 1"][0][0]
    lines = [
        f"# The self-test on {len(there)} x {card}",
        "",
        f"Machine: {machine.described()}; driver {there[0]['driver']}, {there[0]['memory']}; torch {start['torch']}, "
        f"Python {platform.python_version()}. Made by `make gpu-check`.",
        "",
        *(f"- {name}: {seconds:.1f} s in all (budget {BUDGET[name.split()[0]]} s)"
          for name, (_, seconds) in runs.items()),
        f"- failed: {', '.join(failed) or 'nothing'}",
        f"- promised to repeat and did not: {', '.join(apart) or 'nothing'}",
        *achieved(runs["standard 2"][0]),
        "",
        *table(runs),
    ]  # fmt: skip
    (out / f"{stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return FAILED if failed or apart else 0


if __name__ == "__main__":
    program(main)
