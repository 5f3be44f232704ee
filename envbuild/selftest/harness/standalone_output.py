"""The output of a self-test that a person runs without envbuild: a line for each probe, or one JSON document."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from envbuild.selftest.harness.frame_and_message_streams import write_all
from envbuild.selftest.harness.probe_outcome_and_figures import result_note


class Table:
    """Writes one line for each probe: a summary of its checks, or the reason why it failed or was skipped.

    The line has the same format as in `envbuild test`. Details of a failed probe follow on separate lines.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, document: Mapping[str, Any]) -> None:
        render = {"start": _start, "probe": _probe, "end": _end}.get(document["kind"])
        if render:
            write_all(self._fd, (render(document) + "\n").encode("utf-8"))


class Collector:
    """Collects the documents of a run and writes them as one JSON document."""

    def __init__(self) -> None:
        self._documents: list[Mapping[str, Any]] = []

    def __call__(self, document: Mapping[str, Any]) -> None:
        self._documents.append(document)

    def probes(self) -> list[Mapping[str, Any]]:
        return [document for document in self._documents if document["kind"] == "probe"]

    def write(self, fd: int) -> None:
        whole: dict[str, Any] = {"probes": []}
        for document in self._documents:
            rest = {key: value for key, value in document.items() if key != "kind"}
            if document["kind"] == "probe":
                whole["probes"].append(rest)
            else:
                whole[document["kind"]] = rest
        write_all(fd, (json.dumps(whole, allow_nan=False, indent=2) + "\n").encode("utf-8"))


def _start(document: Mapping[str, Any]) -> str:
    line = "torch {torch}, Python {python}, {device}, {threads} threads, level {level}, seed {seed}"
    return line.format(**document)


def _probe(document: Mapping[str, Any]) -> str:
    line = "{status:<8} {probe:<20} {seconds:6.2f} s  {note}".format(note=result_note(document), **document)
    failed = document["status"] == "failed"
    detail = textwrap.indent((document["detail"] or "").rstrip(), "    ").splitlines() if failed else []
    return "\n".join([line.rstrip(), *detail])


def _end(document: Mapping[str, Any]) -> str:
    return "{passed} passed, {failed} failed, {skipped} skipped".format(**document)
