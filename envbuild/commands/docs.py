from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.attest import community
from envbuild.commands.console import emit, json_option
from envbuild.document import display
from envbuild.errors import Fault, FileError, OutOfDate, some
from envbuild.image import records
from envbuild.image.records import Record
from envbuild.insight import markdown, requirements, tables
from envbuild.insight.markdown import Block
from envbuild.plan import lock, resolve, sources
from envbuild.plan.source import Source
from envbuild.plan.store import write_atomically
from envbuild.proof import proved


@click.command("docs", short_help="Locked versions in your own documents.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--check", is_flag=True, help="Write nothing; exit 8 where a block is not what it would be.")
@json_option
def command(files: tuple[Path, ...], check: bool, as_json: bool) -> None:
    """Fill the blocks of Markdown files: what stands between two comments, each alone on its line.

    \b
    <!-- envbuild:table h20,a100 -->     versions, driver, accepted advisories, and the proof:
                                         evidence of this machine, and of evidence/ next to
                                         the document
    <!-- envbuild:minimum h20 -->        what known faults ask for on these GPUs, and where
    <!-- envbuild:requirements h20 -->   every version and hash; constraints: versions alone
    <!-- envbuild:evidence FOLDER -->    who proved what: the signed statements in a folder
                                         next to the document
    <!-- envbuild:end -->

    All files are read before one is written.
    Example: envbuild docs --check README.md
    """
    documents = [_read(file) for file in dict.fromkeys(files)]
    faults = [fault for document in documents for fault in document.faults]
    if faults:
        raise FileError("blocks cannot be read", faults=faults)
    filled = [(document, *_filled(document)) for document in documents]
    drifted = [fault for document, _, changed in filled for fault in _drift(document, changed)]
    if check and drifted:
        raise OutOfDate("documents are out of date", hint="run: envbuild docs FILE...", faults=drifted)
    for document, text, changed in filled:
        if changed:
            write_atomically(document.file, text)
    if as_json:
        rows = [(display(document.file), len(document.blocks), len(changed)) for document, _, changed in filled]
        emit({"files": [{"file": file, "blocks": blocks, "changed": changed} for file, blocks, changed in rows]})
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
        why = "there is no such file" if missing else getattr(error, "strerror", None) or "is not UTF-8 text"
        raise FileError(f"{display(file)}: {why}") from None
    return _Document(file, text, *markdown.blocks(text, display(file)))


def _filled(document: _Document) -> tuple[str, list[Block]]:
    return markdown.fill(document.text, document.blocks, lambda block: _content(block, document.file.parent))


def _drift(document: _Document, changed: list[Block]) -> Iterator[Fault]:
    for block in changed:
        said = f"envbuild:{block.kind} {','.join(block.names)} is not what the profiles and locks give"
        yield Fault(said, display(document.file), block.first + 1)


def _content(block: Block, folder: Path) -> str:
    if block.kind == "evidence":
        return tables.proofs([row for name in block.names for row in _evidence(folder / name)])
    if block.kind == "table":
        published, built = _evidence(folder / _EVIDENCE), list(records.every())
        return tables.versions(_row(name, built, published) for name in block.names)
    if block.kind == "minimum":
        return tables.minimum([resolve.resolve(sources.load(name)).choice.situation for name in block.names])
    listed = requirements.requirements if block.kind == "requirements" else requirements.constraints
    texts = [listed(_locked(name)[2], name) for name in block.names]
    return "\n".join(f"```\n{text}```" for text in texts)


_EVIDENCE = "evidence"  # the folder next to a document that a reader can check


def _evidence(folder: Path) -> list[community.Row]:
    return community.read(folder, datetime.datetime.now(datetime.UTC))


def _row(name: str, built: list[Record], published: list[community.Row]) -> tables.Row:
    source, plan, locked = _locked(name)
    signed = community.proofs(published, source.name, locked.id, proved.models(source.profile))
    proofs = proved.on_disk(source.name, source.profile, locked, built, signed)
    return tables.Row(source.name, resolve.as_locked(plan, locked.versions), locked, proofs)


def _locked(name: str) -> tuple[Source, resolve.Plan, lock.Lock]:
    """Raises OutOfDate where the lock is missing or no longer fits: a document must not say what is not so."""
    source = sources.load(name)
    plan = resolve.resolve(source)
    return source, plan, lock.current(lock.read(source.known_lock), plan, source.lock_file)
