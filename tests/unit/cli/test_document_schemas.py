"""The documents of `--json`: each has a schema, and the output of the commands matches it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator

from envbuild.cli import document_schemas
from envbuild.cli.entry import COMMANDS
from unit import documents
from unit.support import CommandResult, envbuild

from . import json_reference


def with_json(command: click.Command, name: str) -> Iterator[str]:
    """Yield the names of commands that have --json: a command and its subcommands."""
    if any("--json" in parameter.opts for parameter in command.params):
        yield name
    for below, inner in getattr(command, "commands", {}).items():
        yield from with_json(inner, f"{name} {below}")


def test_each_command_with_json_has_a_schema() -> None:
    found = set()
    for name in (name for group in COMMANDS.values() for name in group):
        module = importlib.import_module(f"envbuild.cli.{name.replace('-', '_')}")
        found |= set(with_json(module.command, name))
    assert found - {"export schema"} == set(document_schemas.DOCUMENTS) - {"--version"}


@pytest.mark.slow
@pytest.mark.parametrize("name", document_schemas.DOCUMENTS)
def test_each_schema_is_valid_and_closed(name: str) -> None:
    schema = document_schemas.document_schema(name)
    Draft202012Validator.check_schema(schema)
    for kind in document_schemas.DOCUMENTS[name]:
        assert schema["$defs"][kind.__name__]["additionalProperties"] is False
    assert list(Draft202012Validator(schema).iter_errors({"nothing": 1}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--version", 0), ("advisories", 0), ("advisories h20", 0), ("advisories step-video", 0),
        ("advisories nosuch", 2), ("show", 0), ("show h20", 0), ("show h20 nosuch", 3),
        ("show h20 --html page.html", 0),
        ("diff h20 a100", 0), ("lock --check h20", 0), ("lock --check nosuch", 3), ("init mine --from h20", 0),
        ("export requirements h20", 0), ("export check h20", 0), ("export constraints h20 a100", 0),
        ("export uv h20 a100", 0), ("export poetry h20", 0), ("export conda h20", 0), ("export dockerfile h20", 0),
        ("export apptainer h20", 0), ("export devcontainer nosuch", 3),
        ("export selftest", 0), (f"export ci gitlab h20 --install git+https://host.example/envbuild@{'a' * 40}", 0),
        ("keygen -o team", 0), ("docs page.md", 0), ("test --list", 0), ("explain train.log", 0),
        ("make nosuch", 3), ("verify", 2), ("status --nosuch", 2),
    ],
)  # fmt: skip
def test_the_document_of_a_command_fits_its_schema(
    project: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int
) -> None:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", "secret")
    (project / "page.md").write_text("<!-- envbuild:constraints h20 -->\n<!-- envbuild:end -->\n", encoding="utf-8")
    (project / "train.log").write_text("torch==2.6.0\nGPU 0: NVIDIA H20\nFloating point exception\n", encoding="utf-8")
    done = envbuild(*line.split(), "--json")
    assert (done.code, bool(done.document)) == (code, True), done.stderr  # .document also validates it


@pytest.mark.parametrize(
    "change", [{"state": "proved"}, {"lock": "0123"}, {"image": {"id": "sha256:0"}}, {"evidence": None}, {"more": 1}]
)
def test_a_document_that_differs_is_found(project: Path, change: dict[str, Any]) -> None:
    done: CommandResult = envbuild("show", "h20", "--json")
    with pytest.raises(AssertionError, match="show"):
        documents.require_valid(done.arguments, {**done.document, **change})
    key = next(iter(change))
    if key != "more" and key in done.document:
        with pytest.raises(AssertionError, match="show"):
            documents.require_valid(done.arguments, {k: v for k, v in done.document.items() if k != key})


def test_the_schema_of_a_document_is_exported() -> None:
    assert envbuild("export", "schema", "--document", "make").document["title"] == "envbuild make --json"
    assert envbuild("export", "schema", "--document", "nosuch").code == 2


def test_the_page_lists_the_documents() -> None:
    page = json_reference.PAGE.read_text(encoding="utf-8")
    assert page == json_reference.page(), "cd tests && python -m unit.cli.json_reference"
