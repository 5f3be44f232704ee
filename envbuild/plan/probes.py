"""Which probes the self-test has, read from its catalogue's source: importing it would need torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CATALOGUE = Path(__file__).parent.parent / "selftest" / "catalogue.py"


@dataclass(frozen=True)
class Known:
    """A probe's name, the lowest level that runs it, and the device it needs: "cpu" (any) or "cuda"."""

    name: str
    level: str
    needs: str


@cache
def known() -> Mapping[str, Known]:
    """The probes by name, in the order they run."""
    tree = ast.parse(_CATALOGUE.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Probe"]
    rows = [[arg.value for arg in call.args[:3] if isinstance(arg, ast.Constant)] for call in calls]
    return {str(row[0]): Known(*map(str, row)) for row in rows}
