"""The expected result of each probe and each seeded fault on a simulated GPU, and its memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from selftest.reading import Frame
from selftest.seeds import failures

from envbuild.facts import probe_catalogue_reader

from .gpus import GPUS
from .launch import TIMEOUTS

MOST = {"quick": 8 * 10**9, "standard": 14 * 10**9}  # bytes of the GPU's memory
FILLS = ("init.alloc",)  # takes 90% of what is free, by design, as do burn and memory at level full
WITHOUT_APEX = frozenset(("norm.apex", "optim.apex"))

RIGHT_ON_GPUS = frozenset(failures.RIGHT_ON_GPUS)
WRONG_ON_GPUS = {
    **{seed: (failure, words) for seed, failure, words in failures.WRONG_ON_GPUS},
    "gemm.exact:hangs": ("hang", f"no end after {TIMEOUTS['gemm.exact:hangs']} s"),
    "gemm.exact:leaks": ("oom", "CUDA out of memory"),
    "burn:now_and_then": ("mismatch", "cuda:0: first tf32 product: element [700, 3]"),
    "burn:nan": ("mismatch", "cuda:0: the exact product has 1 wrong rows of 768, the first is 0"),
    "burn:last_bit": ("mismatch", "cuda:0: first fp64 product: element [9, 7] is"),
    "burn:forgets": ("mismatch", "cuda:0: later fp64 products differ in 1 words: element [5, 7] is"),
}


def skipped(gpu: str) -> frozenset[str]:
    """Return the probes that a healthy GPU skips because the GPU is too old, or because apex is not installed."""
    older = (
        name
        for name, probe in probe_catalogue_reader.known_probes().items()
        if GPUS[gpu].capability < probe.least_capability
    )
    return WITHOUT_APEX | frozenset(older)


def alarms(gpu: str, level: str, found: Mapping[str, Frame]) -> Iterator[str]:
    """Return what is wrong with a run of all probes on a simulated GPU. Every probe must pass, except for the skipped
    ones, and stay within memory."""
    for name, frame in found.items():
        status = "skipped" if name in skipped(gpu) else "passed"
        if frame["status"] != status:
            yield f"{gpu}: {name} is {frame['status']} at {frame['at']}: {frame['reason']}"
        peak = frame["traits"]["simulated"]["peak_bytes"]
        if name not in FILLS and level in MOST and peak > MOST[level]:
            yield f"{gpu}: {name} takes {peak / 1e9:.1f} GB at level {level}"


def missed(found: Mapping[str, Frame]) -> Iterator[str]:
    """Return the seeded faults that are not detected or have an unexpected reason, and the right kernels that fail."""
    for seed, frame in found.items():
        failure, words = WRONG_ON_GPUS.get(seed, (None, ""))
        status = "failed" if failure else "passed"
        if (frame["status"], frame["failure"]) != (status, failure) or words not in str(frame["reason"]):
            yield f"{seed} is {frame['status']} ({frame['failure']}): {frame['reason']}"


def unjudged(seeds: Sequence[str]) -> set[str]:
    """Return the seeds for which no result is expected."""
    return set(seeds) - set(WRONG_ON_GPUS) - RIGHT_ON_GPUS
