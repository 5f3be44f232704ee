"""Describes the machine of a measurement in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # so that envbuild need not be installed, for example on a remote GPU machine

from envbuild.doctor import cpu_memory_and_os

RESULTS = Path(__file__).parent / "results"


def described() -> str:
    return str(cpu_memory_and_os.read())


def keep_bytecode(folder: Path) -> None:
    """Let the Python programs that are started afterwards keep their bytecode in a folder, as an installed envbuild
    does: otherwise each start would compile all modules."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


def write(name: str, lines: list[str]) -> None:
    """Write benchmarks/results/<name>.md and show it."""
    RESULTS.mkdir(exist_ok=True)
    text = "\n".join(lines) + "\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
