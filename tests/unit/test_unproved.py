"""docs/unproved.md is complete: it lists exactly the faults for which no test shows that they are named."""

import ast
from pathlib import Path

from selftest.named import SHOWN

import envbuild
from envbuild.facts import database

ROOT = Path(envbuild.__file__).parents[1]


def section(heading: str) -> str:
    text = (ROOT / "docs" / "unproved.md").read_text(encoding="utf-8")
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def listed_advisories() -> dict[str, list[str]]:
    """Return each advisory of the table with its probe and the reason."""
    lines = [line for line in section("Advisories").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    assert len({first for first, *_ in cells}) == len(cells)
    return {first: rest for first, *rest in cells}


def test_every_advisory_with_a_probe_is_shown_or_listed_and_none_is_both() -> None:
    probes = {item.id: item.shows.probes for item in database.advisories() if item.shows.probes}
    listed = listed_advisories()
    missing, unknown = set(probes) - set(listed) - SHOWN, (set(listed) | SHOWN) - set(probes)
    assert not missing, f"{missing}: add it to tests/selftest/named.py or to docs/unproved.md"
    assert not unknown, f"{unknown}: the advisory has no `shows: {{probes: [...]}}` in advisories.yaml"
    assert not set(listed) & SHOWN, "remove it from docs/unproved.md: tests/selftest/named.py has it"
    for name, (probe, reason) in listed.items():
        assert probe in probes[name]
        assert reason


def test_advisories_with_a_signature_are_shown() -> None:
    assert {item.id for item in database.advisories() if item.signature} <= SHOWN


def needing_cuda() -> set[str]:
    """Return the probes that need CUDA, from the source of the self-test's catalogue, which must not be imported
    here."""
    tree = ast.parse((ROOT / "envbuild" / "selftest" / "probes" / "probe_catalogue.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Probe"]
    arguments = [[ast.literal_eval(part) for part in call.args[:3]] for call in calls]
    assert len(arguments) > 20
    return {name for name, _, needs in arguments if needs == "cuda"}


def test_every_probe_that_needs_a_gpu_is_listed() -> None:
    listed = section("Probes").partition(": ")[2].partition(". The others")[0]
    assert set(listed.replace("\n", " ").split(", ")) == needing_cuda()


def test_the_readme_leads_there() -> None:
    assert "(docs/unproved.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
