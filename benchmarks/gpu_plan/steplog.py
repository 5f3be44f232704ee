"""The plan's results on disk: one JSON document per line, in one file for each block, written and flushed as they
arrive.

A record has a "step" and a "kind": "begin" (when, and with which sources), "frame" (of a run of the self-test), "run"
(how that run ended), "saw" (a line for the page), "measured" (numbers for programs), "end" (the verdict). An
interrupted run of the plan leaves a step without its "end", and a last line that may be damaged, which readers ignore.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_plan.selftests import ROOT, Run

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
LARGEST = 15 << 20  # bytes of a file: a remote machine may not return larger files
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

Record = dict[str, Any]


class TooLarge(Exception):
    """The results of a block do not fit into a file."""


@dataclass
class Result:
    """The recorded result of a step. Until its end is recorded, the step counts as failed and interrupted. `complete`:
    the step ended by itself."""

    step: str
    sources: str = ""
    verdict: str = FAILED
    reason: str = "cut off before its end"
    seconds: float = 0.0
    complete: bool = False
    saw: list[str] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)


class StepLog:
    """Records of the steps of one GPU, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, step: str, block: int, **fields: Any) -> None:
        """Discard the records of the step, and begin it again."""
        kept = [record for record in _records(self._file(block)) if record["step"] != step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        replace(self._file(block), text)
        self.append(step, block, "begin", **fields)

    def append(self, step: str, block: int, kind: str, **fields: Any) -> None:
        """Write a record, without UUIDs and without the paths of the checkout and of Python. Raises TooLarge if the
        file would exceed LARGEST, except for a record of kind "end"."""
        line = _without_machine(json.dumps({"step": step, "kind": kind, **fields})) + "\n"
        with self._file(block).open("a", encoding="utf-8") as file:
            if kind != "end" and file.tell() + len(line) > LARGEST:
                raise TooLarge(f"the results of block {block} exceed {LARGEST >> 20} MiB")
            file.write(line)

    def results(self) -> dict[str, Result]:
        """The results by step, in the order of the files and of their lines."""
        found: dict[str, Result] = {}
        for file in sorted(self.folder.glob("block-*.jsonl")):
            for record in _records(file):
                _add(found.setdefault(record["step"], Result(record["step"])), record)
        return found

    def _file(self, block: int) -> Path:
        return self.folder / f"block-{block}.jsonl"


def _without_machine(text: str) -> str:
    """Remove everything that identifies this machine from a text, because results are committed."""
    for folder, name in ((sys.prefix, "(python)"), (str(ROOT), "(checkout)")):  # one path may contain the other
        text = text.replace(folder, name)
    return _UUID.sub("(UUID)", text)


def replace(file: Path, text: str) -> None:
    """Write a file atomically: readers never see a part of it."""
    new = file.with_name(file.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def _records(file: Path) -> Iterator[Record]:
    """The complete records of a file; empty if the file is missing."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"step", "kind"} <= set(record):
            yield record


def _add(result: Result, record: Record) -> None:
    kind = record["kind"]
    if kind == "begin":
        result.sources = record["sources"]
    elif kind == "frame":
        run = result.runs.setdefault(record["run"], Run(record["run"], problem="cut off before its end"))
        run.frames.append(record["frame"])
    elif kind == "run":
        run = result.runs.setdefault(record["run"], Run(record["run"]))
        run.seconds, run.problem = record["seconds"], record["problem"]
    elif kind == "saw":
        result.saw.append(record["text"])
    elif kind == "end":
        result.verdict, result.reason, result.seconds = record["verdict"], record["reason"], record["seconds"]
        result.complete = record["complete"]
