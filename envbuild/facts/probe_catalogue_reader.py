"""Reads the list of self-test probes from their source code, because importing them would need torch."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from envbuild.util.errors import UsageError, near

Level = Literal["quick", "standard", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)
# Extensions that have probes of their own. The name of such a probe ends with the extension: optim.apex.
EXTENSIONS = frozenset({"apex"})
HARNESS = "harness"  # in `versions`: the code that runs the probes and judges their results
_PROBES = Path(__file__).parent.parent / "selftest" / "probes"


@dataclass(frozen=True)
class ProbeInfo:
    """A probe of the self-test. `level`: the lowest level that includes it; "on-request": no level does. `function`:
    its module and function.

    `needs`: "cpu" means any device, "cuda" a GPU, "script" a script of the profile. `least_capability`: the lowest
    compute capability of a GPU that supports the tested feature, as (major, minor).
    """

    name: str
    level: str
    needs: str
    function: tuple[str, str]
    least_capability: tuple[int, int]

    @property
    def does(self) -> str:
        """A description of the probe: the first line of its docstring, after the colon."""
        module, function = self.function
        # read only on demand: every command uses the names, only one shows the descriptions
        tree = ast.parse(next(_PROBES.rglob(f"{module}.py")).read_text(encoding="utf-8"))
        named = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
        docstring = next(map(ast.get_docstring, named), None) or ""
        return docstring.partition("\n")[0].partition(": ")[2]

    def within(self, level: str) -> bool:
        """Whether a run at this level includes the probe."""
        return self.level in LEVELS[: LEVELS.index(level) + 1]


@cache
def known_probes() -> Mapping[str, ProbeInfo]:
    """The probes by name, in the order they run."""
    tree = ast.parse((_PROBES / "probe_catalogue.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Probe"]
    return {probe.name: probe for probe in map(_read, calls)}


@cache
def versions() -> Mapping[str, int]:
    """The version of each probe's computation and judgement, and of the code that runs all probes ("harness").

    Evidence is valid while these versions stay the same. tests/selftest/test_probe_versions.py checks that each version
    matches its code.
    """
    found: dict[str, int] = json.loads((_PROBES / "versions.json").read_text(encoding="utf-8"))
    return found


def _read(call: ast.Call) -> ProbeInfo:
    """Return the probe that a call of Probe(name, level, needs, timeout, function, ...) in the catalogue defines."""
    name, level, needs = (str(ast.literal_eval(argument)) for argument in call.args[:3])
    others = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    return ProbeInfo(name, level, needs, _named(call.args[-1]), others.get("least_capability", (0, 0)))


def _named(function: ast.expr) -> tuple[str, str]:
    """Return (module, function) of the expression `module.function`."""
    assert isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return function.value.id, function.attr


def unknown_probe(name: str) -> str:
    """The error message for an unknown probe."""
    hint = near(name, known_probes()) or f"known: {', '.join(known_probes())}"
    return f"unknown probe {name!r} ({hint})"


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise UsageError, which lists all unknown names, unless every name is that of a probe."""
    wrong = [unknown_probe(name) for name in names if name not in known_probes()]
    if wrong:
        raise UsageError("; ".join(wrong), hint="envbuild test --list")
