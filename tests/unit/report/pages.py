"""Profiles with locks and evidence for pages: a CPU that passed, and four GPUs with many failures."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from envbuild.evidence import evidence_statements_and_store, profile_proofs_and_image_states
from envbuild.evidence.proof_rules import record_digest
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.image import build_records
from envbuild.image.build_records import Record
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.report import run_measurement_reader
from envbuild.report.run_measurement_types import Run
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.testrun.run_result import ProbeResult, TestRun
from envbuild.util import user_folders
from unit.support import image_of, write_profile

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
PRINTS = tuple(GOLDEN / "fingerprints" / f"torch-{version}.json" for version in ("2.13.0", "2.0.1"))
DAY = datetime.datetime(2026, 11, 21, 12, 30, tzinfo=datetime.UTC)
CARD = "Lab H20 96GB"
# Its figures are invented, like the GPU.
FACTS = f"""
as_of: 2026-11
sources: {{made-up: "for a test"}}
gpus:
  - id: lab
    names: ["{CARD}"]
    family: lab
    compute_capability: "9.0"
    memory_gb: [96]
    features: [tf32, bf16, fp8]
    first_cuda: "11.8"
    datacentre: true
    datasheet: {{tflops_fp16: 148.0, tflops_bf16: 148.0, tflops_tf32: 74.0, gb_per_s: 4000.0, source: [made-up]}}
    source: [made-up]
    status: reported
"""
LAB: dict[str, Any] = {
    "description": "four cards for a test",
    "extends": "xdit",
    "gpus": ["lab"],
    "gpu_count": 4,
    "accept": [
        {"advisory": "cublas-hopper-fpe", "reason": "no product of these shapes is known in the project"},
        {"advisory": "nccl-abort-hang", "reason": "the job has a time limit"},
    ],
    "selftest": {"level": "standard", "floor": {"gemm": 0.7, "memory": 0.6}},
}


class _CompiledTemplates(jinja2.BytecodeCache):
    """Keeps compiled templates in memory; jinja compiles a template whose source has changed."""

    def __init__(self) -> None:
        self._code: dict[str, bytes] = {}

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        if bucket.key in self._code:
            bucket.bytecode_from_string(self._code[bucket.key])

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        self._code[bucket.key] = bucket.bytecode_to_string()


_TEMPLATES = _CompiledTemplates()
_LOCKS: dict[Path, Lock | None] = {}


def share_templates_and_shipped_locks(patch: pytest.MonkeyPatch) -> None:
    """Compile the templates of the page once, and read each lock of the repository once: this takes two thirds of the
    time of a page, which reads all of these locks."""
    environment, read = jinja2.Environment, lock_file.read

    def with_compiled_templates(**options: Any) -> jinja2.Environment:
        return environment(**options, bytecode_cache=_TEMPLATES)

    def read_once(file: Path) -> Lock | None:
        if not file.is_relative_to(ROOT / "profiles"):
            return read(file)
        if file not in _LOCKS:
            _LOCKS[file] = read(file)
        return _LOCKS[file]

    patch.setattr(jinja2, "Environment", with_compiled_templates)
    patch.setattr(lock_file, "read", read_once)


def site_facts() -> None:
    """Add the GPU to the site's facts."""
    folder = user_folders.config_file().parent / "facts.d"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lab.yaml").write_text(FACTS, encoding="utf-8")


def lab(project: Path) -> tuple[LoadedProfile, Lock]:
    """A profile of four GPUs, and a lock that equals xdit's except for the environment and the files of two layers."""
    loaded = profile_reader_and_overrides.load(str(write_profile(project, LAB, "lab")))
    plan = plan_resolver.resolve(loaded)
    shipped = lock_file.read(ROOT / "profiles" / "projects" / "xdit.lock.yaml")
    assert shipped is not None
    changed = tuple(
        dataclasses.replace(item, wheel=dataclasses.replace(item.wheel, sha256=item.wheel.sha256[::-1]))
        if item.wheel.name in ("nvidia-cublas-cu12", "numpy")
        else item
        for item in shipped.wheels
    )
    made = dataclasses.replace(shipped, wheels=changed, environment=plan.environment, inputs=lock_file.inputs(plan))
    lock_file.write(made, loaded.lock_file, "lab")
    return loaded, made


def cpu(project: Path) -> tuple[LoadedProfile, Lock]:
    loaded = profile_reader_and_overrides.load("cpu")
    made = lock_file.read(loaded.known_lock)
    assert made is not None
    return loaded, made


def outcome(name: str) -> dict[str, Any]:
    """Return the result of the golden run of that name."""
    text = (GOLDEN / "report" / f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.replace("NVIDIA H20", CARD))
    return found


_MARKUP = "</code></style></pre><script>alert(1)</script><img src=x onerror='alert(2)'>\x1b[31m\u202e"


def hostile() -> dict[str, Any]:
    """Return the run on four GPUs with markup and terminal escape sequences in every text."""
    made = {key: _hostile(item) for key, item in outcome("gpu").items()}
    made["results"][0] = outcome("gpu")["results"][0]  # of the known GPU: results of another GPU are not shown
    return made


def _hostile(value: Any) -> Any:
    """Change every text, except those that determine how the record is read."""
    kept = ("probe", "status", "stage", "level")
    if isinstance(value, dict):
        return {key: item if key in kept else _hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hostile(item) for item in value]
    return f"{value}{_MARKUP}" if isinstance(value, str) else value


def record(
    loaded: LoadedProfile, locked: Lock, run_document: dict[str, Any], errors: tuple[str, ...] = (), day: int = 0
) -> RunRecord:
    results = tuple(map(ProbeResult.model_validate, run_document["results"]))
    run = TestRun(results, run_document["environment"], run_document["start"], errors, run_document["seconds"])
    wanted = profile_proofs_and_image_states.wanted(loaded.name, loaded.profile, locked)
    return evidence_statements_and_store.run_record(
        image_of(loaded.name), wanted, run, "docker 26.1.5", DAY + datetime.timedelta(days=day)
    )


def build(loaded: LoadedProfile, locked: Lock) -> None:
    """Write a build record as if the image of the lock had been built."""
    image, recipe = image_of(loaded.name), lock_image_lookup_and_recipe.recipe_digest(locked, ())
    build_records.write(Record(image.id, image.handle, locked.id, recipe, image.layers, "docker"))


def prove(
    loaded: LoadedProfile, locked: Lock, run_document: dict[str, Any], errors: tuple[str, ...] = (), day: int = 0
) -> Path:
    """Save evidence as if the image of the lock had been built and its self-test had this result."""
    build(loaded, locked)
    return evidence_statements_and_store.save(record(loaded, locked, run_document, errors, day))


def run_of(statement: Path) -> Run:
    return run_measurement_reader.measured_run(
        evidence_statements_and_store.record_of(statement), record_digest(statement)
    )
