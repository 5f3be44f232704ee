"""docs/lines.md: every GPU and its lines, from the facts, the shipped profiles and their locks.

python -m unit.report.line_table        in tests/; writes the page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.lock import lock_file
from envbuild.profile import profile_and_lock_name_lookup, starter_profile
from envbuild.profile.value_types import PLATFORM
from envbuild.report.markdown_generated_sections import markdown_table
from envbuild.resolve import cuda_line_lookup, minimum_driver, profile_reader_and_overrides
from envbuild.util import package_data, yaml_and_project_paths

PAGE = Path(__file__).parents[3] / "docs" / "lines.md"
_HEAD = """# GPUs and lines

Made by `python -m unit.report.line_table` in `tests/`; a test compares it with the profiles, their locks and the facts.

A GPU can have several profiles that differ in CUDA, its lines. The
[guide to profiles](profiles.md#gpus-drivers-and-accepted-advisories) explains how `make` chooses among them.

A current line takes a torch release that is at least 60 days old (2.14.0 in November 2026) or has our own evidence, and
for which no advisory warns on that GPU. H100 and H200 stay at torch 2.11.0, for which apex is pinned, until a newer
release has evidence; an advisory about cuDNN's attention warns there. B200 and RTX 5090 keep the 2.14.1 that they had
before this rule. The only line of the V100 has CUDA 12, and the only lines of Blackwell GPUs have CUDA 13.
"""
_UNWRITTEN = """These GPUs have no profile of their own, or share that of the same chip.
`envbuild make GPU` writes one with the pins of the nearest GPU's current line. For older drivers, write
`profiles/GPU-cu12.yaml`, which extends NEAREST-cu12."""
_LIBRARIES = ("cublas", "cudnn", "nccl")


def page() -> str:
    shipped = [gpu for gpu in _supported() if _is_shipped(gpu)]
    head = ("GPU", "Line", "Profile", "Lock", "torch", "CUDA", "cuBLAS", "cuDNN", "NCCL", "apex", "Driver")
    unwritten = [(gpu.id, _served_by(gpu)) for gpu in _supported() if not _is_shipped(gpu)]
    refused = [(gpu.id, text) for gpu in database.gpus().values() if (text := database.unsupported(gpu.id, PLATFORM))]
    parts = [
        _HEAD.rstrip(),
        "## Shipped lines",
        markdown_table([head, *(row for gpu in shipped for row in _rows(gpu))]),
        "## GPUs that use the pins of another",
        _UNWRITTEN,
        markdown_table([("GPU", "Pins of"), *unwritten]),
        "## Refused",
        markdown_table([("GPU", "Reason"), *refused]),
    ]
    return "\n\n".join(parts) + "\n"


def _supported() -> Iterator[Gpu]:
    return (gpu for gpu in database.gpus().values() if database.unsupported(gpu.id, PLATFORM) is None)


def _is_shipped(gpu: Gpu) -> bool:
    return (package_data.PROFILES / f"{gpu.id}.yaml").is_file()


def _served_by(gpu: Gpu) -> str:
    """The shipped profile of the same family, else the one that a new profile of the GPU extends."""
    family = (one.id for one in database.family(gpu) if _is_shipped(one))
    return next(family, None) or str(yaml_and_project_paths.parse(starter_profile.for_gpu(gpu.id), "x").data["extends"])


def _rows(gpu: Gpu) -> Iterator[tuple[str, ...]]:
    for line in cuda_line_lookup.gpu_lines(gpu.id):
        loaded = profile_reader_and_overrides.load(line.profile)
        lock = lock_file.required_lock(loaded)
        cuda = loaded.profile.cuda
        held = database.libraries_among(lock.versions, cuda)
        (apex,) = [one for one in loaded.profile.extensions if one.name == "apex"]
        yield (
            gpu.id, line.label, line.profile, lock.short, lock.versions["torch"], cuda or "",
            *(held[library] for library in _LIBRARIES),
            str(apex.commit)[:12] if apex.none is None else "-",
            f">= {minimum_driver.oldest(loaded.profile)}",
        )  # fmt: skip


def shipped_lines() -> list[str]:
    """The names of the shipped profiles that are lines of another."""
    return [
        name for name in profile_and_lock_name_lookup.profile_names() if profile_and_lock_name_lookup.named_line(name)
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
