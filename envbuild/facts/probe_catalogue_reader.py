"""Which probes the self-test has, read from its sources: importing them would need torch."""

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
# Those that have probes of their own, called <what>.<extension>.
EXTENSIONS = frozenset({"apex"})
HARNESS = "harness"  # in `versions`: what runs the probes and judges how they end
_PROBES = Path(__file__).parent.parent / "selftest" / "probes"


@dataclass(frozen=True)
class ProbeInfo:
    """A probe's name, the lowest level that runs it ("asked": none does), what it needs, and the module and function
    that it is.

    `needs`: "cpu" is any device, "cuda" a GPU, "script" a script of the profile's own. `least_capability`: the lowest
    compute capability of a GPU that has what is tested, as (major, minor).
    """

    name: str
    level: str
    needs: str
    function: tuple[str, str]
    least_capability: tuple[int, int]

    @property
    def does(self) -> str:
        """The first line of its docstring, after its name."""
        module, function = self.function
        # read when it is asked for: every command knows the names, one of them shows what they do
        tree = ast.parse(next(_PROBES.rglob(f"{module}.py")).read_text(encoding="utf-8"))
        named = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
        said = next(map(ast.get_docstring, named), None) or ""
        return said.partition("\n")[0].partition(": ")[2]

    def within(self, level: str) -> bool:
        """Whether a run at this level has it."""
        return self.level in LEVELS[: LEVELS.index(level) + 1]


@cache
def known_probes() -> Mapping[str, ProbeInfo]:
    """The probes by name, in the order they run."""
    tree = ast.parse((_PROBES / "probe_catalogue.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Probe"]
    return {probe.name: probe for probe in map(_read, calls)}


@cache
def versions() -> Mapping[str, int]:
    """By probe, which version of its judgement this self-test has; "harness" is what runs them all.

    Evidence counts while these are the same. tests/selftest/test_probe_versions.py holds each to its code.
    """
    found: dict[str, int] = json.loads((_PROBES / "versions.json").read_text(encoding="utf-8"))
    return found


def _read(call: ast.Call) -> ProbeInfo:
    """What a call of Probe(name, level, needs, timeout, function, ...) in the catalogue says."""
    name, level, needs = (str(ast.literal_eval(argument)) for argument in call.args[:3])
    others = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    return ProbeInfo(name, level, needs, _named(call.args[-1]), others.get("least_capability", (0, 0)))


def _named(function: ast.expr) -> tuple[str, str]:
    """`module.function` as two words."""
    assert isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return function.value.id, function.attr


def unknown_probe(name: str) -> str:
    """What to say of a name that no probe has."""
    hint = near(name, known_probes()) or f"known: {', '.join(known_probes())}"
    return f"there is no probe {name!r} ({hint})"


def refuse_unknown(names: Iterable[str]) -> None:
    """Raises UsageError naming all that are no probe's."""
    wrong = [unknown_probe(name) for name in names if name not in known_probes()]
    if wrong:
        raise UsageError("; ".join(wrong), hint="envbuild test --list")
