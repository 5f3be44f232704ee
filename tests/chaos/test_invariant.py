"""The checker of the campaigns detects each breach that is planted."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from e2e import engines
from e2e.engines import OwnEngine
from e2e.support import CHECKOUT, Project, Result

from chaos import rounds
from chaos.invariant import HALF, LEFT, WRONG, Ground, check
from chaos.place import Place
from chaos.rounds import Outcome, Struck
from envbuild.image import container_definition_export
from envbuild.image.build_records import Record
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.lock import lock_file

NAME = "sample"


@pytest.fixture(scope="module")
def engine() -> Iterator[OwnEngine]:
    lacking = engines.lacking()
    if lacking:
        pytest.skip(lacking)
    with engines.own_engine() as own:
        yield own


class Sample:
    """A profile that was made and verified according to disk and engine; its image is empty."""

    def __init__(self, root: Path, client: Any) -> None:
        self.root, self.client = root, client
        self.ground = Ground(root / "project", root / "state", root / "cache", root / "tmp", client, {})
        self.lock_file = self.ground.project / "profiles" / f"{NAME}.lock.yaml"
        for folder in (self.lock_file.parent, self.ground.project / "dockerfiles", self.ground.temporary):
            folder.mkdir(parents=True)
        self.lock_file.write_bytes((CHECKOUT / "profiles" / "cpu.lock.yaml").read_bytes())
        found = lock_file.read(self.lock_file)
        assert found
        self.lock = found
        self.dockerfile = self.ground.project / "dockerfiles" / f"{NAME}.Dockerfile"
        self.dockerfile.write_text(container_definition_export.standalone_dockerfile(found, NAME), encoding="utf-8")
        self.image = self.import_image("0", found.id)
        for tag in (found.short, "verified"):
            client.api.tag(self.image, f"envbuild/{NAME}", tag)
        client.api.remove_image(f"envbuild/{NAME}:0")
        record = Record(self.image, self.image, found.id, "f" * 64, (), "docker")
        self.build = self.write("state/envbuild/builds", f"{'f' * 64}-{self.image[7:19]}.json", asdict(record))
        self.record = self.prove("passed")
        self.wheel = self.store("wheels", b"a wheel")
        self.base = self.write_bytes("cache/bases", "base.tar", b"a base")
        self.write_bytes("cache/bases", "base.sha256", hashlib.sha256(b"a base").hexdigest().encode())
        rows = b'[["less", "590-2"]]'
        raw = hashlib.sha256(rows).hexdigest().encode() + b"\n" + rows
        self.apt_result = self.write_bytes("cache/apt-results", "0" * 64, raw)

    def import_image(self, tag: str, lock_id: str) -> str:
        """Import an empty image with a label; return its id."""
        self.client.api.import_image_from_data(
            bytes(1024), repository=f"envbuild/{NAME}", tag=tag,
            changes=[f"LABEL {LOCK_LABEL}={lock_id}", f"LABEL tag={tag}"],
        )  # fmt: skip
        return str(self.client.api.inspect_image(f"envbuild/{NAME}:{tag}")["Id"])

    def write_bytes(self, folder: str, name: str, raw: bytes) -> Path:
        file = self.root / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
        return file

    def write(self, folder: str, name: str, document: Any) -> Path:
        return self.write_bytes(folder, name, json.dumps(document).encode())

    def store(self, kind: str, raw: bytes) -> Path:
        return self.write_bytes(f"cache/{kind}/{hashlib.sha256(raw).hexdigest()}", "file", raw)

    def prove(self, status: str, **keys: Any) -> Path:
        """Write a run record and the statement that refers to it."""
        record = {
            "image": {"id": self.image}, "profile": NAME, "lock": self.lock.id, "before": [], "errors": [],
            "selftest": {"require": ["env.libs"]}, "results": [{"probe": "env.libs", "status": status}], **keys,
        }  # fmt: skip
        digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
        folder = f"state/envbuild/evidence/{self.image[7:]}"
        statement = {"subject": [{"digest": {"sha256": self.image[7:]}}]}
        self.write(folder, f"{digest}.statement.json", statement)
        return self.write(folder, f"{digest}.record.json", record)

    def found(self, settled: bool = True) -> list[tuple[str, str]]:
        return [(breach.kind, breach.what) for breach in check(self.ground, settled)]

    def kinds(self, settled: bool = True) -> set[str]:
        return {kind for kind, _ in self.found(settled)}


@pytest.fixture
def sample(engine: OwnEngine, tmp_path: Path) -> Iterator[Sample]:
    client = engine.client()
    yield Sample(tmp_path, client)
    for container in client.api.containers(all=True):
        client.api.remove_container(container["Id"], force=True)
    for image in client.api.images(all=True):
        client.api.remove_image(image["Id"], force=True)


def test_a_whole_and_proved_state_has_no_breach(sample: Sample) -> None:
    assert sample.found() == []


# a wrong tag


def test_an_image_that_nothing_was_proved_of(sample: Sample) -> None:
    other = sample.import_image("other", sample.lock.id)
    sample.client.api.tag(other, f"envbuild/{NAME}", "verified", force=True)
    sample.client.api.remove_image(f"envbuild/{NAME}:other")
    ((kind, what),) = sample.found()
    assert kind == WRONG and other[:19] in what


def test_another_profiles_image(sample: Sample) -> None:
    sample.client.api.tag(sample.image, "envbuild/other", "verified")
    assert [kind for kind, _ in sample.found()] == [WRONG]


WITHOUT: dict[str, Callable[[Sample], object]] = {
    "no record of its build": lambda sample: sample.build.unlink(),
    "no statement": lambda sample: next(sample.record.parent.glob("*.statement.json")).unlink(),
    "a probe failed later": lambda sample: sample.prove("failed"),
}


@pytest.mark.parametrize("what", WITHOUT)
def test_a_proof_that_does_not_count(sample: Sample, what: str) -> None:
    WITHOUT[what](sample)
    assert WRONG in sample.kinds()


@pytest.mark.parametrize(
    "keys",
    [{"profile": "other"}, {"lock": f"sha256:{'0' * 64}"}, {"image": {"id": f"sha256:{'0' * 64}"}},
     {"results": [{"probe": "env.libs", "status": "skipped"}]}, {"errors": ["it was cut short"]}],
)  # fmt: skip
def test_a_passing_record_that_does_not_match_is_a_breach(sample: Sample, keys: dict[str, Any]) -> None:
    for file in sample.record.parent.iterdir():
        file.unlink()
    sample.prove("passed", **keys)
    assert WRONG in sample.kinds()


def test_a_failure_superseded_by_a_later_pass_is_ignored(sample: Sample) -> None:
    failed = sample.prove("failed")
    sample.prove("passed", before=[failed.name.partition(".")[0]])
    assert sample.found() == []


# an incomplete file


HALVES: dict[str, Callable[[Sample], Path]] = {
    "lock": lambda sample: sample.lock_file,
    "Dockerfile": lambda sample: sample.dockerfile,
    "build record": lambda sample: sample.build,
    "run record": lambda sample: sample.record,
    "statement": lambda sample: next(sample.record.parent.glob("*.statement.json")),
    "wheel": lambda sample: sample.wheel,
    "base": lambda sample: sample.base,
    "result of apt": lambda sample: sample.apt_result,
}


@pytest.mark.parametrize("what", HALVES)
def test_half_a_file(sample: Sample, what: str) -> None:
    file = HALVES[what](sample)
    assert sample.found(settled=False) == []  # and the lock of the Dockerfile is known now
    raw = file.read_bytes()
    time.sleep(0.01)  # so that its time differs from that of the complete file
    file.write_bytes(raw[: len(raw) // 2])
    assert (HALF, True) in [(kind, file.name in text) for kind, text in sample.found(settled=False)]


def test_a_lock_without_its_last_line_is_not_whole(sample: Sample) -> None:
    sample.lock_file.write_bytes(sample.lock_file.read_bytes()[:-1])
    assert HALF in sample.kinds()


# leftovers


def test_a_container_is_left(sample: Sample) -> None:
    sample.client.api.create_container(sample.image, command=["/nothing"], name="envbuild-test-x")
    assert sample.found(settled=False) == []
    assert [kind for kind, what in sample.found() if "envbuild-test-x" in what] == [LEFT]


def test_an_image_is_left(sample: Sample) -> None:
    sample.client.api.tag(sample.image, f"envbuild/{NAME}", f"{sample.lock.short}-layers")
    ((kind, what),) = sample.found()
    assert kind == LEFT and f"{sample.lock.short}-layers" in what


def test_an_image_without_a_name_is_left(sample: Sample) -> None:
    nameless = sample.import_image("gone", "")
    sample.client.api.tag(sample.image, f"envbuild/{NAME}", "gone", force=True)
    sample.client.api.remove_image(f"envbuild/{NAME}:gone")
    assert [(kind, nameless[:19] in what) for kind, what in sample.found()] == [(LEFT, True)]


@pytest.mark.parametrize(
    "name", ["tmp/envbuild-tmp-build-x", "project/profiles/.envbuild-tmp-x", "cache/wheels/.envbuild-tmp-incoming-x"]
)
def test_a_temporary_file_is_left(sample: Sample, name: str) -> None:
    sample.write_bytes(str(Path(name).parent), Path(name).name, b"half")
    assert sample.found(settled=False) == []
    assert [(kind, Path(name).name in what) for kind, what in sample.found()] == [(LEFT, True)]


def test_a_process_is_left(sample: Sample, engine: OwnEngine) -> None:
    place = Place(sample.root, Project(sample.root, sample.root, sample.root), engine)
    env = {"TMPDIR": str(place.temporary)}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env) as process:
        try:
            while process.pid not in place.processes():
                assert process.poll() is None
            assert len(place.processes()) == 1
        finally:
            process.kill()
    assert place.processes() == {}


# the rounds


class Careless:
    """A campaign whose following run fails and leaves something."""

    name = "careless"

    def __init__(self, sample: Sample, code: int) -> None:
        self.sample, self.code = sample, code

    def prepare(self, place: Place) -> None: ...

    def strike(self, place: Place, dice: Any, number: int) -> Struck:
        return Struck("nothing", "nowhere", 9, 0.0, "odd", fair=False)

    def again(self, place: Place) -> Result:
        (self.sample.ground.temporary / "left").mkdir(exist_ok=True)
        if self.code:
            raise AssertionError(f"make ended with {self.code}")
        return Result(0, "", "", 0.0)

    def extra(self, place: Place) -> list[Any]:
        return []

    def close(self) -> None: ...


@pytest.mark.parametrize("code", [0, 6])
def test_a_round_reports_each_breach_and_continues(sample: Sample, engine: OwnEngine, code: int) -> None:
    project = Project(sample.ground.project, sample.ground.state, sample.root / "config", sample.ground.cache)
    place = Place(sample.root, project, engine)
    ran = rounds.run(Careless(sample, code), place, 2, seed=1)
    assert [outcome.next_code for outcome in ran.outcomes] == [-1 if code else 0] * 2
    for outcome in ran.outcomes:  # leftovers of the first round are not charged to the second
        assert "the run under it ended with 9: odd" in outcome.breaches
        assert [f"make ended with {code}" in breach for breach in outcome.breaches].count(True) == bool(code)
        assert [breach for breach in outcome.breaches if LEFT in breach] == [
            f"after the next run: {LEFT}: temporary left"
        ]


def test_a_run_that_fails_by_itself_is_a_breach(sample: Sample, engine: OwnEngine) -> None:
    class Failing(Careless):
        def strike(self, place: Place, dice: Any, number: int) -> Struck:
            raise AssertionError("another image")

    project = Project(sample.ground.project, sample.ground.state, sample.root / "config", sample.ground.cache)
    ran = rounds.run(Failing(sample, 0), Place(sample.root, project, engine), 1, seed=1)
    assert any("another image" in breach for breach in ran.breaches)


def test_a_written_result_reads_back_the_same() -> None:
    outcome = Outcome(Struck("kill", "begin lock", -9, 1.0), 0, 2.0, ("a breach",))
    ran = rounds.Ran("kill", 3, [outcome, replace(outcome, breaches=())], 1.0, 2.0)
    assert rounds.Ran.read(json.loads(json.dumps(asdict(ran)))) == ran
    assert ran.breaches == ["a breach"]
