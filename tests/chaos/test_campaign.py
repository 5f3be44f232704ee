"""Selection of campaigns, numbers of faults, and moments of kills of a GPU image, without real faults."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from e2e import engines
from e2e.support import OTHER_CUBLAS, Project

from chaos import campaign, kills, report
from chaos.invariant import HALF, WRONG, check
from chaos.kills import BUILD, MAKE, STARTS, Kills
from chaos.place import NAME, Place
from chaos.products import CPU, GPU
from chaos.rounds import Outcome, Ran, Struck, ground
from envbuild.image.layers import layer_cache
from envbuild.image.layers.base_and_empty_venv_layers import BaseLayer
from envbuild.lock import lock_file
from envbuild.util import strict_and_canonical_json, user_folders


def place(root: Path, client: Any = None, **keys: Any) -> Place:
    """A place without an engine; `client` stands in for docker's client."""
    engine: Any = SimpleNamespace(client=lambda *_: client)
    made = Place(root, Project.create(root).with_cache(root, "wheels", "bases"), engine, **keys)
    made.temporary.mkdir()
    return made


def test_the_tests_run_no_gpu_image() -> None:
    one_of_each = dict.fromkeys(("kill", "engine", "registry", "index"), 1)
    assert campaign._counts(campaign.COUNTS, None, campaign.SLICE) == one_of_each
    assert campaign._counts(["gpu"], 5, campaign.SLICE) == {}


@pytest.mark.parametrize(("count", "counted"), [(None, 12), (5, 5), (30, 30), (200, 30)])
def test_a_gpu_image_is_killed_so_often(count: int | None, counted: int) -> None:
    assert campaign._counts(["gpu"], count, campaign.COUNTS) == {"gpu": counted}
    assert campaign._counts(["kill"], count, campaign.COUNTS) == {"kill": count or 200}


@pytest.mark.parametrize("free", [29.9e9, 30e9])
def test_a_campaign_without_disk_space_does_not_start(free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert campaign._short_of_room(["kill", "index"]) is None
    message = campaign._short_of_room(["kill", "gpu"])
    if free >= 30e9:
        assert message is None
    else:
        assert message and "the campaign gpu needs 30 GB free in /var/tmp, 29.9 GB are" in message


def test_starts_without_a_round_are_reported() -> None:
    argv = [sys.executable, campaign.__file__, "--starts", "reprove", "gpu"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no round of gpu begins so; its: layer, switch" in done.stderr


def test_options_take_no_campaigns_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "lacking", lambda: None)
    monkeypatch.setattr(sys, "argv", ["campaign", "--starts", "switch", "--starts", "relock", "kill", "engine"])
    arguments = campaign._arguments()
    assert (arguments.starts, arguments.names) == (["switch", "relock"], ["kill", "engine"])


@pytest.mark.parametrize("argv", [["--report", "a.json", "b.json"], ["--report", "a.json", "kill"]])
def test_a_report_runs_no_campaign(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["campaign", *argv])
    with pytest.raises(SystemExit, match="2"):
        campaign._arguments()


@pytest.mark.parametrize("moments", [MAKE, BUILD])
def test_rounds_begin_with_what_there_is(moments: kills.Moments) -> None:
    named = {*moments.shares, *(start for start, _ in moments.boundaries)}
    assert named <= set(STARTS)
    assert {start for start, _ in moments.boundaries} <= set(moments.shares)


def test_a_gpu_image_is_killed_at_boundaries_at_effects_and_at_any_time(tmp_path: Path) -> None:
    seconds = dict.fromkeys(BUILD.shares, 40.0)
    killing = Kills(name="gpu", moments=BUILD, effects=dict.fromkeys(BUILD.shares, 90), seconds=seconds)
    there = place(tmp_path)
    made = [killing._moment(there, random.Random(number), number) for number in range(12)]
    kinds = Counter(kind for _, kind, _, _ in made)
    assert kinds == {"at a step's begin or end": 4, "before an effect": 4, "at a random moment": 4}
    boundaries = [moment for _, kind, moment, _ in made if kind.startswith("at a step")]
    assert boundaries == ["end build", "end load", "end audit", "begin build"]


def test_the_two_gpu_images_differ_in_one_pin() -> None:
    shipped = lock_file.read(GPU.lock_file)
    assert shipped
    assert (GPU.pins("a"), GPU.pins("b"), CPU.pins("b")) == ({}, {"cublas": OTHER_CUBLAS}, {})
    assert not any(OTHER_CUBLAS in item.wheel.file for item in shipped.wheels)


def test_an_image_that_can_only_be_built_is_never_verified(tmp_path: Path) -> None:
    calls = []

    def images(name: str) -> list[dict[str, str]]:
        calls.append(name)
        return [{"Id": f"sha256:{'0' * 64}"}]

    there = place(tmp_path, SimpleNamespace(api=SimpleNamespace(images=images)), product=GPU)
    assert [breach.kind for breach in Kills().extra(there)] == [WRONG]
    assert Kills().extra(replace(there, product=CPU)) == []  # for CPU images, the evidence is checked instead
    assert calls == [f"envbuild/{NAME}:verified"]


def test_the_stores_of_a_place_are_looked_at(tmp_path: Path) -> None:
    there = place(tmp_path)
    torn = there.project.cached("wheels") / ("0" * 64) / "torn.whl"
    torn.parent.mkdir()
    torn.write_bytes(b"half")
    base = there.project.cached("bases") / "torn.tar"
    base.write_bytes(b"half")
    found = [(breach.kind, breach.what.partition(":")[0]) for breach in check(ground(there))]
    assert sorted(found) == [(HALF, "torn.tar"), (HALF, "torn.whl")]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Place, Path, Path]:
    """A place with the cached layer of a base, its blob, and its entry; envbuild in this process uses its cache."""
    there = place(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(there.project.cached("layers").parents[1]))
    folder = there.project.cached("layers")
    assert user_folders.cache_folder("layers") == folder
    write_layer(there)
    (blob,), (entry,) = (folder / "blobs").iterdir(), folder.glob("*.json")
    return there, blob, entry


def write_layer(there: Place) -> None:
    """Write the layer of a base, or the parts of that layer that are missing or damaged in the cache."""
    base = there.project.cached("bases") / "base.tar"
    base.write_bytes(b"a base" * 1000)
    base.with_suffix(".sha256").write_text(hashlib.sha256(base.read_bytes()).hexdigest(), encoding="utf-8")
    layer_cache.stream_layer(BaseLayer(base))


def faults(there: Place) -> list[str]:
    return [breach.what for breach in check(ground(there)) if breach.kind == HALF]


LAYER_DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a blob with a changed byte": lambda blob, entry: blob.write_bytes(b"x" + blob.read_bytes()[1:]),
    "half a blob": lambda blob, entry: blob.write_bytes(blob.read_bytes()[:20]),
    "an empty blob": lambda blob, entry: blob.write_bytes(b""),
    "half an entry": lambda blob, entry: entry.write_bytes(entry.read_bytes()[:20]),
    "an entry with another size": lambda blob, entry: entry.write_text(
        json.dumps({**json.loads(entry.read_bytes()), "size": 1}), encoding="utf-8"
    ),
    "an entry that is a list": lambda blob, entry: entry.write_text("[]", encoding="utf-8"),
}


@pytest.mark.parametrize("damage", LAYER_DAMAGES)
def test_damage_in_the_cache_of_layers_is_a_breach_until_the_next_run(
    cached: tuple[Place, Path, Path], damage: str
) -> None:
    there, blob, entry = cached
    assert faults(there) == []
    LAYER_DAMAGES[damage](blob, entry)
    damaged = blob if "blob" in damage else entry
    assert [what.partition(":")[0] for what in faults(there)] == [damaged.name]
    write_layer(there)
    assert faults(there) == []


def test_an_entry_may_not_name_the_blob_of_another_layer(cached: tuple[Place, Path, Path]) -> None:
    there, _, entry = cached
    found = json.loads(entry.read_bytes())
    found["diff_id"] = f"sha256:{'0' * 64}"
    values = [found[name] for name in ("key", "digest", "size", "diff_id", "diff_size")]
    found["check"] = strict_and_canonical_json.canonical_digest(values)
    entry.write_text(json.dumps(found), encoding="utf-8")
    assert faults(there) == [f"{entry.name}: its blob is of another layer"]
    entry.rename(entry.with_name(f"{'0' * 64}.json"))
    assert faults(there) == [f"{'0' * 64}.json: of another layer"]


def test_a_blob_may_be_missing_and_is_written_by_the_next_run(cached: tuple[Place, Path, Path]) -> None:
    there, blob, _ = cached
    blob.unlink()
    assert faults(there) == []
    write_layer(there)
    assert blob.is_file() and faults(there) == []


def test_results_of_several_runs_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Outcome(Struck("before an effect", "layer, effect 3", -9, 1.0), 0, 2.5, ())
    for name, seed in (("kill", 1), ("gpu", 11)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps([asdict(Ran(name, seed, [outcome]))]), encoding="utf-8")
    written: list[str] = []
    monkeypatch.setattr(campaign, "write", lambda name, lines: written.extend(lines))
    files = sorted(tmp_path.glob("*.json"))
    monkeypatch.setattr(sys, "argv", ["campaign", *(f"--report={file}" for file in files)])
    assert campaign.main() == 0
    assert "## SIGKILL for envbuild in `build` of a GPU image: 1" in written
    assert "| before an effect | layer | 1 | killed: 1 | 0: 1 | 2.5, 2.5 |" in written
    assert f"## {report._WHAT['kill']}: 1" in written
    assert "Cut short: gpu had 1 of 12 faults." in written
    explained = [line for line in written if line.startswith(("- `", "- an effect: "))]
    assert explained == [f"- `layer`: {report._STARTS['layer']}", report._EFFECT], "those that occur alone"


def test_the_result_says_what_each_round_begins_with() -> None:
    assert set(report._STARTS) == set(STARTS)


@pytest.mark.parametrize("content", [None, "no json", "{}", '{"a": 1}', "[]", "[1]", '[{"name": "kill"}]'])
def test_a_report_of_an_invalid_file_is_an_error(tmp_path: Path, content: str | None) -> None:
    """Without a campaign, no result is written either."""
    file = tmp_path / "ran.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"ran\.json"):
        campaign._read(file)
