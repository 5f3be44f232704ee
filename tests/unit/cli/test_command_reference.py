"""docs/commands.md matches --help."""

from __future__ import annotations

from . import command_reference


def test_the_page_is_that_of_these_commands() -> None:
    page = command_reference.PAGE.read_text(encoding="utf-8")
    assert page == command_reference.page(), "cd tests && python -m unit.cli.command_reference"
