"""The fingerprint document, which describes the machine and each operation, and its file.

{"version": 1, "subject": "operations" or "model", "inputs": sha256 of the inputs, "machine", "ops"}, and each of "ops":
{"id", "dtype", "shape", "exact": whether only equality is accepted, "backend", "flags": those that are on, "note": why
a pass or a comparison is missing, or null, "golden": sha256 of its golden output, or null, "teacher", "free": the
statistics of the two passes from output_statistics.py, or null; "free" with "drift"}.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

import torch

from envbuild.selftest.inventory import loaded_library_versions, mapped_library_origins
from envbuild.selftest.inventory.cuda_library_finder import library_of_file
from envbuild.selftest.nvidia import nvidia_driver_query

VERSION = 1
OPERATIONS, MODEL = "operations", "model"

_CPU = Path("/proc/cpuinfo")
_FLAGS: dict[str, Callable[[], bool]] = {
    "tf32.matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "tf32.cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "reduced.fp16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "reduced.bf16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "accumulate.fp16": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "deterministic": torch.are_deterministic_algorithms_enabled,
}


def document(subject: str, inputs: str, device: torch.device, ops: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the document; `subject` is OPERATIONS or MODEL.

    Call it after the operations: libraries are mapped when they are first needed.
    """
    return {"version": VERSION, "subject": subject, "inputs": inputs, "machine": recording_machine(device), "ops": ops}


def write(made: Mapping[str, Any], file: str | Path) -> None:
    """Write the document for `envbuild diff`: strict JSON, keys sorted."""
    text = json.dumps(made, allow_nan=False, indent=1, sort_keys=True)
    Path(file).write_text(text + "\n", encoding="utf-8")


def flags() -> list[str]:
    """The enabled torch settings that affect precision or order, as far as this torch has them."""
    found = []
    for name, ask in _FLAGS.items():
        # AssertionError: torch 2.0 has no such setting. RuntimeError: set through newer ones.
        with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
            found += [name] if ask() else []
    return found


def recording_machine(device: torch.device) -> dict[str, Any]:
    """The GPU (null on the CPU), the processor, torch, and the version that each mapped CUDA library reports."""
    capability = re.search(r"CPU capability usage: (\S+)", torch.__config__.show())
    copies = [path for path in mapped_library_origins.mapped() if library_of_file(Path(path).name)]
    return {
        "gpu": _gpu(device) if device.type == "cuda" else None,
        "cpu": _first(_CPU, r"model name\s*:\s*(.+)"),
        "cpu_capability": capability[1] if capability else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "libraries": {
            str(library_of_file(Path(path).name)): said
            for path, said in loaded_library_versions.reported(copies).items()
        },
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "sms": found.multi_processor_count,
        "driver": nvidia_driver_query.kernel_module_version(),
    }


def _first(file: Path, pattern: str) -> str | None:
    """The first group of the pattern's first match; None if it does not match, or the file cannot be read."""
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None
