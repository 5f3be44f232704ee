"""Builds and writes the fingerprint document, which describes the machine and the output of each operation.

The document is {"version": 1, "subject": "operations" or "model", "inputs": sha256 of the inputs, "machine":
`recording_machine`, "ops": a list}. Each item of "ops" has these keys:

- "id", "dtype", "shape", "backend": of the operation and its output
- "exact": whether the output must equal the reference exactly
- "flags": the enabled torch settings (`flags`)
- "note": why a pass or a comparison is missing that the operation should have, or null
- "golden": sha256 of the golden output, which is the exact output rounded to the dtype, or null
- "teacher", "free": statistics (output_statistics.py) of two passes, or null. In the pass "teacher", the input of an
  operation is the golden output of the previous one. In "free", it is the actual output of the previous one
- "drift" in "free": the distance of the output from the golden output, or null
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

    Call this function after the operations ran, because a library is mapped, and then listed, only after its first use.
    """
    return {"version": VERSION, "subject": subject, "inputs": inputs, "machine": recording_machine(device), "ops": ops}


def write(made: Mapping[str, Any], file: str | Path) -> None:
    """Write the document as strict JSON with sorted keys, for `envbuild diff`."""
    text = json.dumps(made, allow_nan=False, indent=1, sort_keys=True)
    Path(file).write_text(text + "\n", encoding="utf-8")


def flags() -> list[str]:
    """Return the enabled torch settings that affect the precision or the order of operations.

    Settings that torch cannot report are left out: it does not have them, or they were changed through a replacement.
    """
    found = []
    for name, ask in _FLAGS.items():
        # torch 2.0 raises AssertionError for an unknown setting. torch raises RuntimeError for a setting that was
        # changed through its newer replacement.
        with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
            found += [name] if ask() else []
    return found


def recording_machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine: the GPU (None for a run on the CPU), the processor, torch, and the version that each mapped
    CUDA library reports."""
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
    """Return the first group of the pattern's first match in a file.

    The result is None if the pattern does not match, or if the file cannot be read.
    """
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None
