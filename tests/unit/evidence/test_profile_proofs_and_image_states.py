"""The proofs of a lock from the evidence on disk, without an engine."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from envbuild.evidence import evidence_statements_and_store, profile_proofs_and_image_states
from envbuild.image import build_records
from envbuild.image.build_records import Record
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from unit.evidence.runs import passed_run, probe
from unit.support import PROFILE, envbuild, image_of, lock_for, plan_of, profile_of

DAY = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
CARDS: dict[str, Any] = {**PROFILE, "torch": "2.7.1", "gpus": ["a100", "h20"], "packages": []}


class World:
    """A profile, its lock, and the images and the evidence of this lock."""

    def __init__(self, folder: Path, data: dict[str, Any]) -> None:
        self.loaded: LoadedProfile = profile_of(folder, data)
        self.lock: Lock = lock_for(plan_of(folder, data))

    def built(self, handle: str = "1", lock: str | None = None) -> str:
        image = image_of(handle)
        build_records.write(
            Record(image.id, image.handle, lock or self.lock.id, f"recipe{handle}", image.layers, "docker")
        )
        return handle

    def tested(self, handle: str, card: str | None = None, outcome: str = "passed", day: int = 0) -> None:
        cards = [{"name": card}] if card else []
        run = passed_run(probe("env.identity", traits={"gpus": cards}), probe("env.libs", outcome))
        wanted = profile_proofs_and_image_states.wanted("sample", self.loaded.profile, self.lock)
        finished = DAY + datetime.timedelta(days=day)
        evidence_statements_and_store.save(
            evidence_statements_and_store.run_record(image_of(handle), wanted, run, "docker", finished)
        )

    def sentence(self) -> str:
        return profile_proofs_and_image_states.proof_sentence(
            "sample",
            profile_proofs_and_image_states.on_disk(
                "sample", self.loaded.profile, self.lock, build_records.all_records()
            ),
        )


@pytest.fixture
def cpu(project: Path) -> World:
    return World(project, PROFILE)


@pytest.fixture
def cards(project: Path) -> World:
    return World(project, CARDS)


def test_without_a_build_and_without_evidence_it_is_unverified(cpu: World) -> None:
    assert cpu.sentence() == "unverified"
    cpu.built()
    assert cpu.sentence() == "unverified"
    assert (
        profile_proofs_and_image_states.proof_sentence(
            "sample", profile_proofs_and_image_states.on_disk("sample", cpu.loaded.profile, None, ())
        )
        == "unverified"
    )


def test_a_profile_for_the_cpu_goes_by_its_own_name(cpu: World) -> None:
    cpu.tested(cpu.built(), outcome="failed")
    assert cpu.sentence() == "sample: the self-test failed: env.libs"


def test_a_proof_says_on_what_and_when(cpu: World) -> None:
    cpu.tested(cpu.built())
    assert cpu.sentence() == "proved on the CPU, 2026-11-21"


def test_evidence_on_an_image_that_was_not_built_from_this_lock_counts_for_nothing(cpu: World) -> None:
    cpu.tested("1")
    assert cpu.sentence() == "unverified"
    cpu.built("1", lock="sha256:another")
    assert cpu.sentence() == "unverified"


def test_show_lists_the_proof_of_each_gpu_model(cards: World) -> None:
    handle = cards.built()
    cards.tested(handle, "NVIDIA H20")
    assert cards.sentence() == "proved on NVIDIA H20, 2026-11-21; a100: unverified"
    cards.tested(handle, "NVIDIA A800-SXM4-80GB", day=1)  # of one family with the A100
    assert cards.sentence() == "proved on NVIDIA A800-SXM4-80GB, 2026-11-22; proved on NVIDIA H20, 2026-11-21"


def test_a_failure_is_reported(cpu: World) -> None:
    cpu.tested(cpu.built(), outcome="failed")
    assert cpu.sentence() == "sample: the self-test failed: env.libs"


def test_the_best_image_of_a_lock_counts(cpu: World) -> None:
    """A failure of one image does not affect the evidence of another image."""
    cpu.tested(cpu.built("2"), outcome="failed", day=1)
    cpu.tested(cpu.built("1"))
    assert cpu.sentence() == "proved on the CPU, 2026-11-21"


def test_show_prints_the_proof_with_a_name_and_without(cards: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")
    assert envbuild("show", "sample").stdout.splitlines()[-1] == "  unverified"
    cards.tested(cards.built(), "NVIDIA H20")
    # the lock is missing on disk, so the evidence counts as that of a different lock
    assert envbuild("show", "sample").stdout.splitlines()[-1].strip() == "unverified"
    lock_file.write(cards.lock, cards.loaded.lock_file, "sample")
    document = envbuild("show", "sample", "--json").document
    proof = envbuild("show", "sample").stdout.splitlines()[-1].strip()
    assert proof == "proved on NVIDIA H20, 2026-11-21; a100: unverified"
    assert [(row["model"], row["state"]) for row in document["evidence"]] == [("a100", "missing"), ("h20", "verified")]
    (row,) = [row for row in envbuild("show", "--json").document["profiles"] if row["profile"] == "sample"]
    assert (row["gpus"], row["cuda"], row["evidence"]) == (["a100", "h20"], "12.6", document["evidence"])
    table = envbuild("show").stdout.splitlines()
    assert table[0].split() == ["PROFILE", "GPUS", "TORCH", "CUDA", "PYTHON", "LOCK", "PROOF"]
    assert next(line for line in table if line.startswith("sample ")).endswith(proof)
