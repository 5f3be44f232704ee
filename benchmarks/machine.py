"""The machine that a result was measured on, in a line."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def described() -> str:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        "unknown CPU",
    )
    return f"{cpu}, {os.cpu_count()} cores, {platform.platform(terse=True)}, Python {platform.python_version()}"


def write(name: str, lines: list[str]) -> None:
    """Write benchmarks/results/<name>.md and show it."""
    target = Path(__file__).parent / "results" / f"{name}.md"
    target.parent.mkdir(exist_ok=True)
    text = "\n".join(lines) + "\n"
    target.write_text(text, encoding="utf-8")
    print(text)
