"""List the files of the layers of an image, independently of their order in the archives. Uses no code of envbuild."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any


def of_image(client: Any, image: str, folder: Path) -> list[str]:
    """Return a digest for each layer, of all its entries sorted. `folder`: a temporary folder for the image file."""
    file = folder / f"{image[-12:]}.tar"
    try:
        with file.open("wb") as saved:
            for block in client.api.get_image(image):
                saved.write(block)
        with tarfile.open(file) as archive:
            (manifest,) = json.load(_opened(archive, "manifest.json"))
            return [_layer(_opened(archive, name)) for name in manifest["Layers"]]
    finally:
        file.unlink(missing_ok=True)


def _opened(archive: tarfile.TarFile, name: str) -> Any:
    stream = archive.extractfile(name)
    assert stream
    return stream


def _layer(stream: Any) -> str:
    entries = []
    with tarfile.open(fileobj=stream) as layer:
        for member in layer:
            content = layer.extractfile(member) if member.isreg() else None
            digest = hashlib.file_digest(content, "sha256").hexdigest() if content else ""  # type: ignore[arg-type]
            about = {key: value for key, value in member.get_info().items() if key != "chksum"}
            entries.append(json.dumps([about, member.pax_headers, digest], sort_keys=True, default=repr))
    return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest()
