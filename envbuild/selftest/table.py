"""What a person sees of a bare run: a line for each probe as it ends, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from envbuild.selftest.frames import write_all


class Table:
    """Writes a line for each probe, with its worst figure or its reason."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, document: Mapping[str, Any]) -> None:
        render = {"start": _start, "probe": _probe, "end": _end}.get(document["kind"])
        if render:
            write_all(self._fd, (render(document) + "\n").encode("utf-8"))


class Collector:
    """Keeps the documents and writes them as one."""

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
    line = "torch {torch}, Python {python}, {device}, {threads} threads, level {level}"
    return line.format(**document)


def _probe(document: Mapping[str, Any]) -> str:
    line = "{status:<8} {probe:<22} {seconds:7.2f} s  ".format(**document)
    if document["status"] == "passed":
        return line + _worst(document["figures"])
    cause = " ".join(str(document[key]) for key in ("failure", "signal") if document[key])
    at = " at {}".format(document["at"]) if document["at"] else ""
    return line + (cause + at + ": " if cause else "") + str(document["reason"])


def _worst(figures: list[Mapping[str, Any]]) -> str:
    if not figures:
        return ""
    worst = max(figures, key=lambda figure: float(figure["ratio"]))
    line = "{count} cases, worst {error} of {bound} in {case} {dtype}"
    return line.format(count=len(figures), **worst)


def _end(document: Mapping[str, Any]) -> str:
    return "{passed} passed, {failed} failed, {skipped} skipped".format(**document)
