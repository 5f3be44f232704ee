from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from envbuild.attest import community_evidence
from envbuild.cli.command_options import json_option
from envbuild.cli.console import emit
from envbuild.evidence import profile_proofs_and_image_states
from envbuild.image import build_records
from envbuild.image.build_records import Record
from envbuild.lock import lock_file, requirements_export
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.report import markdown_generated_sections, profile_markdown_tables
from envbuild.report.markdown_generated_sections import Block
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import Fault, FileError, OutOfDate, some
from envbuild.util.yaml_and_project_paths import display


@dataclass(frozen=True)
class FilledFile:
    """A Markdown file. `blocks`: the number of its generated blocks; `changed`: how many of them were changed."""

    file: str
    state: Literal["current", "written"]
    blocks: int
    changed: int


@dataclass(frozen=True)
class FilledFiles:
    """The document of `docs`."""

    files: tuple[FilledFile, ...]


@click.command("docs", short_help="Write locked versions into your own documents.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--check", is_flag=True, help="Only check: exit 8 if a block is out of date.")
@json_option
def command(files: tuple[Path, ...], check: bool, as_json: bool) -> None:
    """Update generated blocks in Markdown files. A block is the text between one of these comments and the comment that
    ends it, each on a line of its own.

    \b
    <!-- envbuild:table h20,a100 -->     versions, driver, accepted advisories, and the proof:
                                         evidence of this machine, and of evidence/ next to
                                         the document
    <!-- envbuild:minimum h20 -->        minimum versions on these GPUs, by known fault
    <!-- envbuild:requirements h20 -->   every version and hash
    <!-- envbuild:constraints h20 -->    only versions
    <!-- envbuild:evidence FOLDER -->    who proved what: the signed statements in a folder
                                         next to the document
    <!-- envbuild:end -->

    All files are read and checked before the first is written.
    Example: envbuild docs README.md
    Example: envbuild docs --check README.md
    """
    documents = [_read(file) for file in dict.fromkeys(files)]
    faults = [fault for document in documents for fault in document.faults]
    if faults:
        raise FileError("invalid blocks", faults=faults)
    filled = [(document, *_filled(document)) for document in documents]
    drifted = [fault for document, _, changed in filled for fault in _drift(document, changed)]
    if check and drifted:
        raise OutOfDate("documents are out of date", hint="run: envbuild docs FILE...", faults=drifted)
    for document, text, changed in filled:
        if changed:
            write_atomically(document.file, text)
    if as_json:
        emit(
            FilledFiles(
                tuple(
                    FilledFile(
                        display(document.file), "written" if changed else "current", len(document.blocks), len(changed)
                    )
                    for document, _, changed in filled
                )
            )
        )
        return
    for document, _, changed in filled:
        blocks = some(len(document.blocks), "block")
        click.echo(f"{display(document.file)}: {blocks}, {len(changed) or 'none'} changed")


@dataclass(frozen=True)
class _Document:
    file: Path
    text: str
    blocks: list[Block]
    faults: list[Fault]


def _read(file: Path) -> _Document:
    try:
        with file.open(encoding="utf-8", newline="") as opened:
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        why = "file not found" if missing else getattr(error, "strerror", None) or "is not UTF-8 text"
        raise FileError(f"{display(file)}: {why}") from None
    return _Document(file, text, *markdown_generated_sections.blocks(text, display(file)))


def _filled(document: _Document) -> tuple[str, list[Block]]:
    return markdown_generated_sections.fill_blocks(
        document.text, document.blocks, lambda block: _content(block, document.file.parent)
    )


def _drift(document: _Document, changed: list[Block]) -> Iterator[Fault]:
    for block in changed:
        message = f"envbuild:{block.kind} {','.join(block.names)} does not match the profiles and locks"
        yield Fault(message, display(document.file), block.first + 1)


def _content(block: Block, folder: Path) -> str:
    if block.kind == "evidence":
        return profile_markdown_tables.proofs_table([row for name in block.names for row in _evidence(folder / name)])
    if block.kind == "table":
        published, built = _evidence(folder / _EVIDENCE), list(build_records.all_records())
        return profile_markdown_tables.versions_table(_row(name, built, published) for name in block.names)
    if block.kind == "minimum":
        return profile_markdown_tables.minimum(
            [plan_resolver.resolve(profile_reader_and_overrides.load(name)).choice.situation for name in block.names]
        )
    listed = requirements_export.requirements if block.kind == "requirements" else requirements_export.constraints
    texts = [listed(_locked(name)[2], name) for name in block.names]
    return "\n".join(f"```\n{text}```" for text in texts)


_EVIDENCE = "evidence"  # a folder next to the document: it holds the statements that readers of the document can check


def _evidence(folder: Path) -> list[community_evidence.EvidenceRow]:
    return community_evidence.read(folder, datetime.datetime.now(datetime.UTC))


def _row(
    name: str, built: list[Record], published: list[community_evidence.EvidenceRow]
) -> profile_markdown_tables.ProfileRow:
    loaded, plan, locked = _locked(name)
    signed = community_evidence.community_proofs(
        published, loaded.name, locked.id, profile_proofs_and_image_states.models_to_prove(loaded.profile)
    )
    proofs = profile_proofs_and_image_states.on_disk(loaded.name, loaded.profile, locked, built, signed)
    return profile_markdown_tables.ProfileRow(
        loaded.name, plan_resolver.as_locked(plan, locked.versions), locked, proofs
    )


def _locked(name: str) -> tuple[LoadedProfile, plan_resolver.Plan, lock_file.Lock]:
    """Return a profile, its plan and its lock. Raises OutOfDate if the lock is missing or does not match the profile,
    since a document must not contain wrong versions."""
    loaded = profile_reader_and_overrides.load(name)
    plan = plan_resolver.resolve(loaded)
    return loaded, plan, lock_file.current_lock(loaded, plan)
