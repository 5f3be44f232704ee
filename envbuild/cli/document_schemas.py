"""Lists the types of all documents that commands print with --json, and derives their JSON Schemas from the types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from envbuild.attest.image_verifier import VerdictDocument
from envbuild.audit.environment_audit import AuditDocument
from envbuild.cli import (
    advisories,
    docs,
    export_documents,
    init,
    keygen,
    load,
    lock,
    pin_digests,
    prune,
    show,
    status,
    test,
)
from envbuild.doctor.envbuild_versions import Versions
from envbuild.doctor.machine_checks_and_suitability import MachineDocument
from envbuild.doctor.node_comparison import ClusterDocument
from envbuild.evidence.image_status import StatusDocument
from envbuild.evidence.python_environment_status import EnvironmentStatusDocument
from envbuild.explain.explanation_document import ExplanationDocument
from envbuild.pipeline.bisection_search_and_result import BisectionDocument
from envbuild.pipeline.environment_proof import EnvironmentProofDocument
from envbuild.pipeline.model import MakeDocument
from envbuild.pipeline.oci_export_workflow import ExportedImage
from envbuild.pipeline.preflight_report import Preflight
from envbuild.pipeline.push_save_and_load import Pushed
from envbuild.repair.lock_installer import InstalledLock
from envbuild.repair.repair_output import ProgramDocument, RepairDocument, UndoneRepair
from envbuild.report.fingerprint_comparison import FingerprintDiffDocument
from envbuild.report.profile_and_image_diff import DiffDocument
from envbuild.report.profile_page_contents import PageDocument
from envbuild.testrun.json_test_report import TestDocument
from envbuild.util.errors import ErrorDocument
from envbuild.util.json_output_types import AdvisoryRow

DOCUMENTS: Mapping[str, tuple[type, ...]] = {
    "advisories": (advisories.AdvisoryList,),
    "audit": (AuditDocument,),
    "bisect": (BisectionDocument,),
    "build": (MakeDocument,),
    "diff": (DiffDocument, FingerprintDiffDocument),
    "docs": (docs.FilledFiles,),
    "doctor": (MachineDocument, ClusterDocument),
    "explain": (ExplanationDocument,),
    "export apptainer": (export_documents.ExportedFile,),
    "export check": (export_documents.ExportedFile,),
    "export ci": (export_documents.CiJob,),
    "export conda": (export_documents.ExportedFile,),
    "export constraints": (export_documents.ExportedFile,),
    "export devcontainer": (export_documents.ExportedFile,),
    "export dockerfile": (export_documents.ExportedFile,),
    "export oci": (ExportedImage,),
    "export poetry": (export_documents.ExportedFile,),
    "export requirements": (export_documents.ExportedFile,),
    "export selftest": (export_documents.ExportedFile,),
    "export uv": (export_documents.ExportedFile,),
    "fix": (RepairDocument, UndoneRepair),
    "init": (init.NewProfile,),
    "install": (InstalledLock,),
    "keygen": (keygen.KeyPair,),
    "load": (load.LoadedDocument,),
    "lock": (lock.LockResult,),
    "make": (MakeDocument, Preflight),
    "pin-digests": (pin_digests.PinnedDigests,),
    "prune": (prune.PrunedItems,),
    "push": (Pushed,),
    "run": (ProgramDocument,),
    "save": (Pushed,),
    "show": (show.ShowDocument, show.ProfileList, PageDocument),
    "status": (StatusDocument, EnvironmentStatusDocument, status.OutdatedPins),
    "test": (TestDocument, MakeDocument, EnvironmentProofDocument, test.ProbeList, test.ScriptDocument),
    "verify": (VerdictDocument,),
    "--version": (Versions,),
}
"""Command -> the types of its documents. `export schema` is missing, since it prints a schema."""
SEVERAL = frozenset(
    {
        "build",
        "make",
        "show",
        "status",
        "test",
        *(name for name, kinds in DOCUMENTS.items() if kinds == (export_documents.ExportedFile,)),
    }
    - {"export selftest"}
)
"""The commands whose document for several profiles is {"profiles": [...]}."""


def document_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's document.

    The document of a successful command has every key. The document of a failed command has `error`, and those keys
    whose values were known. If a profile is refused, it may also contain `profile` and `advisories`.
    """
    kinds = (*DOCUMENTS[name], ErrorDocument, AdvisoryRow)
    _, made = TypeAdapter.json_schemas([(kind, "validation", TypeAdapter(kind)) for kind in kinds])
    definitions = {key: _closed(value) for key, value in made["$defs"].items()}
    error = {"$ref": "#/$defs/ErrorDocument"}
    whole = [{"$ref": f"#/$defs/{kind.__name__}"} for kind in DOCUMENTS[name]]
    refusal = {
        "profile": {"type": ["string", "null"]},
        "advisories": {"type": "array", "items": {"$ref": "#/$defs/AdvisoryRow"}},
    }
    for kind in DOCUMENTS[name]:
        keys = {**refusal, **definitions[kind.__name__]["properties"], "error": error}
        definitions[f"Failed{kind.__name__}"] = {
            "type": "object", "properties": keys, "required": ["error"], "additionalProperties": False,
        }  # fmt: skip
    failed = [{"$ref": f"#/$defs/Failed{kind.__name__}"} for kind in DOCUMENTS[name]]
    forms: list[dict[str, Any]] = [*whole, *failed]
    if name in SEVERAL:
        rows = {"type": "array", "items": {"anyOf": [*whole, *failed]}}
        forms.append({
            "type": "object", "properties": {"profiles": rows, "error": error}, "required": ["profiles"],
            "additionalProperties": False,
        })  # fmt: skip
    title = "envbuild --version --json" if name == "--version" else f"envbuild {name} --json"
    return {"$schema": _DIALECT, "title": title, "anyOf": forms, "$defs": definitions}


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _closed(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with all its keys required and other keys forbidden."""
    if "properties" not in definition or "additionalProperties" in definition:
        return definition
    return {**definition, "required": list(definition["properties"]), "additionalProperties": False}
