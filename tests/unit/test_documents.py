"""The README and what it leads to: links lead somewhere, commands and their options exist, the first page is first."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest

import envbuild
from envbuild.cli.entry import COMMANDS

ROOT = Path(envbuild.__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/profiles.md",
    "docs/proving.md",
    "docs/settings.md",
    "docs/architecture.md",
)
KNOWN = {name for group in COMMANDS.values() for name in group}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("https://")]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def lines(page: str) -> list[list[str]]:
    """The commands of a page, each as words, without what its remark says."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^    (?:\$ )?envbuild ([a-z].*)$", text, re.MULTILINE)
    found += re.findall(r"`envbuild ([a-z][^`]*)`", text)
    return [line.partition("#")[0].split() for line in found]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    for name, *words in lines(page):
        assert name in KNOWN, f"envbuild {name}"
        command: click.Command = importlib.import_module(f"envbuild.cli.{name.replace('-', '_')}").command
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if isinstance(command, click.Group):
            inner = command.commands[words[0]].params
            known |= {option for parameter in inner for option in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.rstrip(",;.") for word in words if word.startswith("-") and word != "-"}
        assert options <= known | {"--help"}, f"envbuild {name}: {options - known}"


def test_the_first_page_is_what_is_sought_first() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:3] == ["A run has died", "Use a proved image", "Two commands"]
    assert "envbuild export ci github" in text.partition("## Two commands")[0]
    assert len(text.splitlines()) < 250
