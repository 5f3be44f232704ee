"""Fingerprints for tests: two that were recorded, and ways to change them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envbuild.testrun.fingerprint_reader import Fingerprint

GOLDEN = Path(__file__).parents[2] / "golden" / "fingerprints"
NEW, OLD = GOLDEN / "torch-2.13.0.json", GOLDEN / "torch-2.0.1.json"

Document = dict[str, Any]


def load(file: Path = NEW) -> Document:
    found: Document = json.loads(file.read_text(encoding="utf-8"))
    return found


def op(document: Document, name: str) -> Document:
    (found,) = (item for item in document["ops"] if item["id"] == name)
    assert isinstance(found, dict)
    return found


def changed(change: Callable[[Document], object], document: Document | None = None) -> Document:
    made = copy.deepcopy(document) if document else load()
    change(made)
    return made


def model(document: Document) -> Fingerprint:
    return Fingerprint.model_validate(document)
