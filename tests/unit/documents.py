"""Checks a document of `--json` against the schema of its command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from envbuild.cli import document_schemas


@cache
def _validator(command: str) -> Draft202012Validator:
    return Draft202012Validator(document_schemas.document_schema(command))


def command_of(arguments: Sequence[str]) -> str | None:
    """Return the command in a command line; None for a command without a document."""
    names = (" ".join(arguments[:2]), *arguments[:1], *(word for word in arguments if word == "--version"))
    return next((name for name in names if name in document_schemas.DOCUMENTS), None)


def require_valid(arguments: Sequence[str], document: Mapping[str, Any]) -> None:
    """Raise AssertionError with the differences if the document does not match the schema of its command. The document
    of a command without a schema is not checked."""
    command = command_of(arguments)
    if command is None:
        return
    failed, several = "error" in document, "profiles" in document
    for error in _validator(command).iter_errors(document):
        nearest = [
            f"{form}: {'/'.join(map(str, one.absolute_path))}: {one.message[:300]}"
            for one in error.context or ()
            for form in [str(one.schema_path[0])]
        ]
        raise AssertionError(f"{command} (failed: {failed}, several: {several}):\n" + "\n".join(nearest[:20]))
