"""Images that must be refused, built for real: each is the proved image with one defect."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .support import REQUIRED, command, docker, handle, inspect

PACKAGES = "/opt/venv/lib/python3.11/site-packages"
# Images contain no bytecode. With torch's bytecode in a layer that they share, their self-tests need not compile it.
_COMPILED = 'RUN PYTHONDONTWRITEBYTECODE= python -c "import torch"'

# A processor raises SIGFPE for an integer division by zero, as in cuBLAS's heuristic.
_LIBRARY = """
int divide(int a, int b) { return a / b; }
int store(volatile int *where, int what) { return *where = what; }
"""

_HEAD = """
import ctypes, time, torch
import torch.nn.functional as F
library = ctypes.CDLL("/opt/libfault.so")
"""

# `import torch` runs this at its end: the Python of a self-test runs no .pth file.
PATCHES = {
    "divides": """
def linear(*_, **__):
    return library.divide(1, 0)
F.linear = linear
""",
    "segfaults": """
def linear(*_, **__):
    return library.store(None, 1)
F.linear = linear
""",
    "hangs": """
def bmm(*_, **__):
    time.sleep(3600)
torch.bmm = bmm
""",
    "stalls": """
def mm(*_, **__):
    time.sleep(3600)
torch.mm = mm
""",
    "hogs": """
def bmm(*_, **__):
    return [b"x" * (1 << 28) for _ in range(1000)]
torch.bmm = bmm
""",
    "nan": """
attention = F.scaled_dot_product_attention
def wrong(*arguments, **keys):
    result = attention(*arguments, **keys)
    result[0, 0, -1, 7] = float("nan")
    return result
F.scaled_dot_product_attention = wrong
""",
    "flashless": """
attention = F.scaled_dot_product_attention
def without_flash(*arguments, **keys):
    if not torch.backends.cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return attention(*arguments, **keys)
F.scaled_dot_product_attention = without_flash
""",
    "other-card": """
class Card:
    name, major, minor = "NVIDIA A100-SXM4-80GB", 8, 0
    multi_processor_count, total_memory, uuid = 108, 80 << 30, None
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
torch.cuda.get_device_properties = lambda index: Card
""",
    "element": """
product = torch.bmm
def bmm(*arguments, **keys):
    result = product(*arguments, **keys)
    result[1, 2, 3] += 1
    return result
torch.bmm = bmm
""",
}


@dataclass
class Workshop:
    """Builds broken images from the tag of a good one, each once."""

    good: str
    repository: str
    folder: Path
    made: dict[str, str] = field(default_factory=dict)

    def image(self, fault: str) -> str:
        """Return the reference of the image with that fault: a key of PATCHES, "version" or "forged"."""
        if fault not in self.made:
            self.made[fault] = self._build(fault)
        return self.made[fault]

    def _build(self, fault: str) -> str:
        context = self.folder / fault
        context.mkdir(parents=True)
        lines = {"version": self._version, "forged": self._forged}.get(fault, lambda _: self._patched(fault, context))
        text = "\n".join([f"FROM {self.good}", *lines(context)])
        (context / "Dockerfile").write_text(text, encoding="utf-8")
        reference = f"{self.repository}:{fault}"
        docker("build", "--quiet", "--network=none", "--tag", reference, context)
        assert handle(reference) != handle(self.good)
        return reference

    def _patched(self, fault: str, context: Path) -> list[str]:
        (context / "fault.py").write_text(_HEAD + PATCHES[fault], encoding="utf-8")
        shutil.copy(self._library(), context / "libfault.so")
        patch = f"RUN echo 'import fault' >> {PACKAGES}/torch/__init__.py"
        return [_COMPILED, "COPY libfault.so /opt/", f"COPY fault.py {PACKAGES}/", patch]

    def _library(self) -> Path:
        source, built = self.folder / "fault.c", self.folder / "libfault.so"
        if not built.exists():
            source.write_text(_LIBRARY, encoding="utf-8")
            command("gcc", "-O0", "-shared", "-fPIC", "-o", built, source)
        return built

    def _version(self, context: Path) -> list[str]:
        """Make torch report version 2.12.1, to imports and to pip."""
        edit = f"sed -i 's/2\\.13\\.0/2.12.1/' {PACKAGES}/torch/version.py {PACKAGES}/torch-*.dist-info/METADATA"
        return [f"RUN {edit}"]

    def _forged(self, context: Path) -> list[str]:
        """Install a `python` that answers any job with valid frames, except for the nonce."""
        documents: list[dict[str, Any]] = [
            {"kind": "start", "python": "3.11.2", "torch": "2.13.0+cpu", "device": "cpu", "threads": 2,
             "level": "quick", "probes": list(REQUIRED), "pid": 7},
            *({"kind": "probe", "probe": name, "level": "quick", "status": "passed", "reason": None, "failure": None,
               "signal": None, "at": None, "detail": None, "figures": [], "seconds": 0.1, "traits": {}}
              for name in REQUIRED),
            {"kind": "end", "passed": len(REQUIRED), "failed": 0, "skipped": 0, "probes": len(REQUIRED)},
        ]  # fmt: skip
        frames = []
        for number, document in enumerate(documents):
            body = json.dumps(document)
            frames.append(f"ENVBUILD {'0' * 32} {number} {zlib.crc32(body.encode()):08x} {body}")
        output = "\n".join([*frames, "all passed"])
        script = f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit 0\n"
        (context / "python").write_text(script, encoding="utf-8")
        (context / "python").chmod(0o755)
        return ["COPY python /opt/forged", 'RUN ["mv", "/opt/forged", "/opt/venv/bin/python"]']

    def record(self, fault: str, of: Path) -> str:
        """Return the text of the build record `of`, forged to name this image."""
        image = inspect(self.image(fault))
        data = json.loads(of.read_text(encoding="utf-8"))
        data.update(image=image["Id"], handle=image["Id"], layers=image["RootFS"]["Layers"])
        return json.dumps(data)
