"""Two images of one lock: which differences a campaign accepts, and which it reports."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.support import Project, Result

from chaos.engines import Engines
from chaos.place import Place
from chaos.products import CPU

BEFORE, NOW = "sha256:" + 64 * "a", "sha256:" + 64 * "b"
REPORTED = f"  not reproducible: this lock gave {BEFORE} before, and {NOW} now; layer 2 of 2 differs\n"
BASE = {"etc/": None, "etc/os": "debian"}
TORCH = {"torch/": None, "torch/lib.so": "cublas", "torch.dist-info/": None, "torch.dist-info/RECORD": "lib.so"}
SWAPPED = dict(reversed(TORCH.items()))


def tar(files: Mapping[str, str | bytes | None]) -> bytes:
    """Return a tar of files by name; None stands for a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            raw = content.encode() if isinstance(content, str) else content or b""
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return buffer.getvalue()


def saved(*layers: Mapping[str, str | None]) -> bytes:
    """Return the image as `docker save` writes it."""
    named = {f"{number}/layer.tar": tar(files) for number, files in enumerate(layers)}
    return tar({**named, "manifest.json": json.dumps([{"Config": "c.json", "Layers": [*named]}])})


class Engine:
    """An engine with these saved images."""

    def __init__(self, **images: bytes) -> None:
        self.images = {f"sha256:{64 * name}": raw for name, raw in images.items()}
        self.api = SimpleNamespace(get_image=self._saved)

    def _saved(self, image: str) -> Iterator[bytes]:
        raw = self.images[image]
        return (raw[at : at + 1000] for at in range(0, len(raw), 1000))

    def client(self, timeout: int = 60) -> Any:
        return self


def made(root: Path, monkeypatch: pytest.MonkeyPatch, now: bytes, stderr: str = REPORTED, looked: bool = True) -> None:
    """Simulate a run whose lock gave an image before, and now gives `now`. `looked`: the earlier image, which is gone,
    was listed."""
    engine = Engine(a=saved(BASE, TORCH), b=now)
    place = Place(root, Project.create(root), engine, CPU, images={"a": BEFORE})  # type: ignore[arg-type]
    if looked:
        place.look(BEFORE)
    del engine.images[BEFORE]
    document = {"state": "verified", "image": NOW}
    monkeypatch.setattr(Place, "run", lambda *_, **__: Result(0, json.dumps(document), stderr, 1.0))
    monkeypatch.setattr("chaos.place.lock_file.read", lambda file: SimpleNamespace(id="lock"))
    monkeypatch.setattr("chaos.place.container_definition_export.standalone_dockerfile", lambda *_: "FROM scratch")
    place.lock_file.write_text("lock", encoding="utf-8")
    place.make("a")
    assert not [*root.glob("*.tar")] and place.others == [NOW]


def test_a_different_order_that_was_reported_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, monkeypatch, saved(BASE, SWAPPED))


@pytest.mark.parametrize(
    "layers",
    [
        (BASE, {**SWAPPED, "torch/lib.so": "cudart"}),
        (BASE, {**SWAPPED, "torch/lib.so": None}),
        (BASE, {**SWAPPED, "torch/more": ""}),
        (BASE, {"torch/": None, "torch/lib.so": "cublas"}),
        ({**BASE, "etc/os": "ubuntu"}, TORCH),
        (TORCH, BASE),
        (BASE, TORCH, {}),
        (BASE,),
    ],
)
def test_other_files_never_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[dict[str, str | None], ...]
) -> None:
    with pytest.raises(
        AssertionError, match=f"gave {NOW}, and before {BEFORE}, which hold other files in layer [123]$"
    ):
        made(tmp_path, monkeypatch, saved(*layers))


@pytest.mark.parametrize("stderr", ["", REPORTED.replace(BEFORE, "sha256:cc"), f"{BEFORE}\n{NOW}\n"])
def test_a_change_that_was_not_reported_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str
) -> None:
    with pytest.raises(AssertionError, match="the same files, and no run reported it"):
        made(tmp_path, monkeypatch, saved(BASE, SWAPPED), stderr)


def test_an_image_that_was_not_read_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the campaign that kills the engine lists its images first. In all other campaigns, a second image of a lock
    is an error."""
    with pytest.raises(AssertionError, match=f"gave {NOW}, and before {BEFORE}$"):
        made(tmp_path, monkeypatch, saved(BASE, SWAPPED), looked=False)


@pytest.mark.parametrize(("start", "listed"), [("relock", [NOW]), ("cold", [NOW]), ("switch", []), ("reprove", [])])
def test_a_round_of_the_engine_keeps_the_records_and_lists_an_image_that_it_removes(
    tmp_path: Path, start: str, listed: list[str]
) -> None:
    """The record of the earlier image is kept: without it the change of image could not be noticed."""
    api = SimpleNamespace(images=lambda *_: [], get_image=lambda image: iter([saved(BASE, TORCH)]))
    engine = SimpleNamespace(client=lambda *_: SimpleNamespace(api=api))
    place = Place(tmp_path, Project.create(tmp_path), engine, CPU, images={"a": BEFORE, "b": NOW})  # type: ignore[arg-type]
    place.heard.append(REPORTED)
    place.records.mkdir(parents=True)
    record = place.records / f"recipe-{12 * 'b'}.json"
    record.write_text("{}", encoding="utf-8")
    Engines()._begin(place, start)
    assert record.read_text(encoding="utf-8") == "{}" and place.heard == []
    assert [*place.listings] == listed
