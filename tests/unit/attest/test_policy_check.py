"""`verify` applies the same known faults to a record as `make` applies to the profile."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from envbuild.attest import policy_check
from envbuild.attest.policy import Policy
from envbuild.evidence import evidence_statements_and_store, run_record_schema
from envbuild.evidence.proof_rules import EvidenceRequirements
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.facts import database
from envbuild.resolve.torch_compatibility_and_advisories import choose_stack
from unit.evidence.runs import passed_run
from unit.support import PROFILE, image_of, profile_of, sha

COMPAT = {"url": "https://example.org/compat.deb", "sha256": sha("compat")}
DAY = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)


def record(torch: str, driver: str = "550.54.15", **distributions: str) -> RunRecord:
    changes = {
        "gpu": {"model": "h20", "name": "NVIDIA H20", "driver": driver},
        "environment": {"distributions": {"torch": torch, **distributions}},
    }
    wanted = EvidenceRequirements("sample", f"sha256:{sha('lock')}", "quick", (), {})
    made = evidence_statements_and_store.run_record(image_of(), wanted, passed_run(), "docker", DAY)
    return run_record_schema.validate_record({**json.loads(made.encoded), **changes})


def known(found: RunRecord, folder: Path, **changes: Any) -> set[str]:
    profile = profile_of(folder, {**PROFILE, "gpus": ["h20"], **changes}).profile
    return {advisory.id for advisory in database.matching(policy_check.proved_situation(found, Policy(()), profile))}


@pytest.mark.parametrize(("driver", "holds"), [({"compat": COMPAT}, False), ({}, True)])
def test_an_old_driver_is_enough_with_forward_compatibility(project: Path, driver: dict[str, Any], holds: bool) -> None:
    found = known(record("2.11.0"), project, torch="2.11.0", driver=driver)
    assert ("driver-too-old-cu13" in found) is holds


def test_a_build_that_the_facts_do_not_know_has_the_profile_s_cuda(project: Path) -> None:
    """Then libraries of a different CUDA version that are installed but unused are not taken for libraries that torch
    uses."""
    profile = profile_of(project, {**PROFILE, "gpus": ["h20"], "torch": "2.4.9+cu121", "cuda": "12.1"}).profile
    held = {"nvidia-cublas-cu12": "12.4.5.8", "nvidia-cublas-cu11": "11.11.3.6", "nvidia-cublas": "13.1.0.3"}
    found = policy_check.proved_situation(record("2.4.9+cu121", **held), Policy(()), profile)
    assert (found.cuda, found.libraries["cublas"]) == ("12.1", "12.4.5.8")


def test_a_profile_gives_the_resolver_and_the_policy_the_same_situation(project: Path) -> None:
    values = {"gpus": ["h20"], "torch": "2.11.0", "gpu_count": 2, "features": ["fp8"], "driver": {"compat": COMPAT}}
    loaded = profile_of(project, {**PROFILE, **values})
    planned, proved = (
        choose_stack(loaded).situation,
        policy_check.proved_situation(record("2.11.0"), Policy(()), loaded.profile),
    )
    for name in ("gpus", "torch", "cuda", "gpu_count", "features", "environment"):
        assert getattr(planned, name) == getattr(proved, name)
