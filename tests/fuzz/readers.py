"""Targets: logs for explain, Markdown, image references, wheels, their descriptions, compiled files, and the input of
doctor."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from selftest.device import HEADS, container, elf_with, library
from unit.image.test_extension_wheel_check import ASKED, GOOD, TAG

from envbuild.attest import image_digest_pinning
from envbuild.doctor import (
    kernel_log_reader,
    machine_checks_and_suitability,
    node_comparison,
    remote_node_reader,
)
from envbuild.doctor import machine_readings as machine_model
from envbuild.doctor.check_result import Check
from envbuild.explain import cause_ranking, explanation_document, log_reader_and_search
from envbuild.image import extension_wheel_check, shared_extension_cache
from envbuild.lock.lock_entry_types import RecordedWheel
from envbuild.registry import oci_types
from envbuild.report import markdown_generated_sections
from envbuild.selftest.inventory import extension_file_reader
from envbuild.util.json_output_types import plain
from fuzz.strategies import BYTES, TEXTS, Draw, as_json, files, json_files, spoiled, yaml_files
from fuzz.target import Target

TESTS = Path(__file__).parents[1]
LOGS = [file.read_bytes()[:4000] for file in sorted((TESTS / "logs").glob("*.log"))]
PACKED = [gzip.compress(log, mtime=0) for log in LOGS[:20]]
_LINES = sorted({one for log in LOGS for one in log.splitlines(keepends=True) if len(one) < 400})


def _log(raw: bytes) -> None:
    json.dumps(
        plain(explanation_document.document(cause_ranking.explain(log_reader_and_search.read(io.BytesIO(raw))))),
        allow_nan=False,
    )


_MORE = (
    b"\r" * 50,
    b"x" * 3000,
    b"\x1b[" + b"1;" * 300,
    b"rank " * 100,
    b"9" * 400,
    b"torch==2.3.1+cu" + b"1" * 30,
    b"torch==1.2.3..",
    b"numpy==9.9a.b",
    b"CUDA capability sm_99",
    b"NVIDIA H20",
    b"\xff\xfea\0\n\0",
)

MARKDOWN = [
    b"# A\n\n<!-- envbuild:table h20,a100 -->\n| a |\n<!-- envbuild:end -->\n\n```\n<!-- envbuild:end -->\n```\nend\n",
    b"<!-- envbuild:minimum h20 -->\r\n<!-- envbuild:end -->\r\n<!-- envbuild:evidence e -->\n<!-- envbuild:end -->",
]
_MARKS = (
    b"<!-- envbuild:table h20 -->\n",
    b"<!-- envbuild:end -->\n",
    b"<!-- envbuild:x",
    b"```",
    b"~~~~",
    b" " * 3000,
    b"-->",
    b"\t" * 2000,
    b"<!--" * 500,
    b"\x0c",
    b"\xe2\x80\xa8",
    b"\x1c",
    b"envbuild:" * 200,
    b"\r",
    b"`" * 3000,
)


def _markdown(raw: bytes) -> None:
    """Text outside of blocks must stay; a second fill must change nothing; one cell must stay one cell."""
    text = raw.decode("utf-8", "replace")
    found, faults = markdown_generated_sections.blocks(text, "README.md")
    cell = markdown_generated_sections.cell_text(text[:200])
    # by CommonMark, a `<` opens a tag or an address only before these characters
    opens = r"[\x00-\x1f\x7f\u2028\u2029]|(?<!\\)(\||<[A-Za-z/!?]|<[^\s<>]*@)"
    assert not re.search(opens, re.sub(r"&#\d+;", " ", cell))
    if faults:
        return
    filled, changed = markdown_generated_sections.fill_blocks(text, found, lambda block: f"| {cell} |")
    again, _ = markdown_generated_sections.blocks(filled, "README.md")
    assert [(block.kind, block.names) for block in again] == [(block.kind, block.names) for block in found]
    assert markdown_generated_sections.fill_blocks(filled, again, lambda block: f"| {cell} |") == (filled, [])
    assert changed or filled == text


REFERENCES = [
    b"FROM registry.example/team/h20:verified\nimage: localhost:5000/a:verified@sha256:" + b"0" * 64,
    b"docker.io/library/debian:12",
    b"[::1]:5000/a/b__c:tag",
    b"a@sha256:" + b"0" * 64,
]
_PARTS = (
    b"a." * 500,
    b"a/" * 500,
    b"-" * 500,
    b":verified",
    b"@sha256:",
    b"localhost/",
    b"__" * 99,
    b"http://",
    b"%",
    b"\n",
)


def _reference(raw: bytes) -> None:
    text = raw.decode("utf-8", "replace")
    made, found = image_digest_pinning.pinned(text, lambda image: f"sha256:{'1' * 64}")
    assert len(found) == len(list(image_digest_pinning.image_references(made))) and all(
        pin.current for pin in image_digest_pinning.pinned(made, lambda image: f"sha256:{'1' * 64}")[1]
    )
    parsed = oci_types.Reference.parse(text)
    assert oci_types.Reference.parse(str(parsed)) == parsed


@st.composite
def _wheels(draw: Draw) -> tuple[str, bytes]:
    """Draw a wheel with odd members and headers but correct checksums, or a wheel with changed bytes."""
    folder = "apex-0.1.dist-info"
    about = {
        f"{folder}/METADATA": b"Name: apex\n",
        f"{folder}/WHEEL": f"Tag: {TAG}\n".encode(),
        f"{folder}/RECORD": b"",
    }
    files = {**GOOD, **about}
    names = list(files)
    odd = draw(st.sampled_from(names))
    content = draw(spoiled(st.just(files[odd]), BYTES)) if draw(st.booleans()) else files[odd]
    name = draw(
        st.sampled_from((odd, odd, odd, *(text.replace("\0", "") for text in TEXTS), f"../{odd}", f"{odd}/", names[0]))
    )
    method = draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, raw in files.items():
            info = zipfile.ZipInfo(name if path == odd else path)
            info.compress_type = method if path == odd else zipfile.ZIP_STORED
            info.external_attr = draw(st.sampled_from((0, 0o100644 << 16, 0o120777 << 16))) if path == odd else 0
            archive.writestr(info, content if path == odd else raw)
    raw = buffer.getvalue()
    if draw(st.booleans()):
        raw = draw(
            spoiled(st.just(raw), (*BYTES, b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"\x0e\0", b"\x0c\0"))
        )
    file = f"apex-0.1-{TAG}.whl"
    if not draw(st.integers(0, 19)):
        file = draw(st.sampled_from(TEXTS)).replace("/", "").replace("\0", "")[:60] + ".whl"
    return file, raw


def _wheel(value: tuple[str, bytes]) -> None:
    name, raw = value
    file = Path(name)
    file.write_bytes(raw)
    try:
        faults = extension_wheel_check.wheel_faults(file, **ASKED)  # type: ignore[arg-type]
        assert all(isinstance(fault, str) and fault for fault in faults)
        try:
            extension_wheel_check.contents(file)
        except ValueError:
            assert faults
    finally:
        file.unlink()


_DESCRIPTION: dict[str, Any] = {
    "file": f"apex-0.1-{TAG}.whl",
    "sha256": "0" * 64,
    "bytes": 1000,
    "seconds": 1800.5,
    "jobs": 8,
    "made": "20261121T000000Z",
    "from": {"recipe": 1, "source": {"name": "apex"}, "wheels": {"torch": "0" * 64}, "compiler": "registry.example/x"},
}


def _description(raw: bytes) -> None:
    """An accepted description names a file in one folder, and is of these inputs."""
    found = shared_extension_cache._checked_description(raw, None, _DESCRIPTION["from"])
    assert Path(found.file).name == found.file and found.file.isprintable() and found.file.endswith(".whl")
    assert 0 < found.bytes <= 4 << 30 and re.fullmatch("[0-9a-f]{64}", found.sha256)
    again = as_json(found.model_dump(by_alias=True))
    recorded = RecordedWheel("apex", "0" * 64, found.file, found.sha256, found.bytes)
    assert shared_extension_cache._checked_description(again, recorded, _DESCRIPTION["from"]) == found


@cache
def _libraries() -> list[bytes]:
    own = [
        library(),
        library("sm_90", "compute_90a"),
        elf_with({".nv_fatbin": container(*HEADS) + b"\0" * 64 + container("sm_80")}),
    ]
    return [*own, _loadable()]


def _loadable() -> bytes:
    """Return an ELF file with three segments: a loaded one, a dynamic section with a soname, a note with a build id."""
    strings = b"\0libx.so.1\0libtorch.so\0$ORIGIN\0"
    dynamic = b"".join(
        tag.to_bytes(8, "little") + value.to_bytes(8, "little")
        for tag, value in ((5, 400), (10, len(strings)), (14, 1), (1, 11), (29, 23), (0, 0))
    )
    note = bytes.fromhex("04000000 04000000 03000000 474e5500 01020304")
    parts = {400: strings, 500: dynamic, 700: note}
    rows = ((1, 0, 0, 1000), (2, 500, 500, len(dynamic)), (4, 700, 700, len(note)))
    head = bytearray(1000)
    head[:64] = elf_with({})[:64]
    head[32:40], head[54:58] = (64).to_bytes(8, "little"), (56).to_bytes(2, "little") + len(rows).to_bytes(2, "little")
    for number, (kind, offset, address, size) in enumerate(rows):
        row = b"".join(value.to_bytes(8, "little") for value in (kind, offset, address, address, size, size, 8))
        head[64 + 56 * number : 120 + 56 * number] = row
    for at, content in parts.items():
        head[at : at + len(content)] = content
    return bytes(head)


_FIELDS = (
    b"\xff" * 8,
    b"\0" * 8,
    b"\xff\xff",
    b"\0\0",
    b"\1\0\0\0",
    b"\xff\xff\xff\x7f",
    b"\0" * 7 + b"\x80",
    b"\x50\xed\x55\xba",
)


def _compiled(raw: bytes) -> None:
    file = Path("file.so")
    file.write_bytes(raw)
    found = extension_file_reader.read(str(file), "pkg/file.so")
    assert found.damaged or found.machine >= 0


_NODE: dict[str, Any] = {
    "version": 1,
    "host": {"name": "a", "time": "now"},
    "driver": {"version": "550.54.15", "cuda": "12.4", "fault": None},
    "gpus": [{"name": "NVIDIA H20", "memory_total": 10**11, "mig": False}],
    "software": {"nccl": "2.21.5", "torch": "2.3.1"},
    "rdma": [{"name": "mlx5_0/1", "state": "ACTIVE", "link": "InfiniBand", "rate": "400 Gb/sec"}],
    "checks": [{"id": "gpu.ecc", "state": "fail", "detail": "a bad row", "remedy": None}],
}


def _node(raw: bytes) -> None:
    """Compare a hostile node with two equal ones: the comparison can be written and shown."""
    found = [node_comparison.parse("odd", raw), *(node_comparison.parse(name, as_json(_NODE)) for name in "ab")]
    for several in (found, found[:1], found[:2]):
        checks = node_comparison.compare_nodes(several)
        json.dumps(plain(node_comparison.document(several, checks)))
        assert all("\x1b" not in check.detail and "\n" not in check.detail for check in checks)


_CLUSTER = [{"hosts": ["a", "user@b.example", "10.0.0.1"], "envbuild": "/opt/envbuild/bin/envbuild"}]


def _cluster(raw: bytes) -> None:
    """Each command line names one host, which is not an option, and one remote command without shell syntax."""
    file = Path("hosts.yaml")
    file.write_bytes(raw)
    for host, argv in remote_node_reader._ssh(file).items():
        assert argv[-2] == host and argv[-3] == "--" and not host.startswith("-")
        assert not set(host + argv[-1].removesuffix(" doctor --json")) & set(" \n\"'`$;|&<>()\\*?!#")


_KERNEL = [
    b"6,1,0,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off.\n[ 1.0] NVRM: Xid (PCI:0000:3b:00): 48, x\n"
]


def _kernel(raw: bytes) -> None:
    found = kernel_log_reader.parse_xids(raw)
    assert all(
        0 <= xid.number <= 9999 and xid.text.isprintable() and len(xid.text) <= machine_model.MAX_TEXT for xid in found
    )
    assert machine_model.clean(raw.decode("utf-8", "replace")).isprintable()
    assert machine_model.short_address(raw.decode("utf-8", "replace")).isprintable()


_TEXT = st.sampled_from(("NVIDIA H20", "550.54.15", "12.4", "9.0", "completed", "", *TEXTS[:30])).map(
    machine_model.clean
)
_NUMBER = st.sampled_from((None, 0, 1, 10**11, 2**64 - 1))  # as NVML counts
_CARDS = st.builds(
    machine_model.GpuReading,
    st.integers(0, 3),
    _TEXT,
    _TEXT,
    _TEXT,
    _TEXT,
    _NUMBER,
    _NUMBER,
    st.none() | st.builds(machine_model.Mig, st.booleans(), st.booleans(), st.integers(0, 8)),
    st.builds(machine_model.Ecc, st.none() | st.booleans(), _NUMBER, st.booleans(), st.booleans()),
    st.none() | _TEXT,
    st.none() | _TEXT,
    st.tuples() | st.tuples(st.builds(machine_model.Holder, st.integers(), _TEXT, _NUMBER)),
)
_DRIVERS = st.builds(
    machine_model.DriverReading,
    st.none() | _TEXT,
    st.none() | _TEXT,
    st.lists(_CARDS, max_size=3).map(tuple),
    st.lists(_TEXT, max_size=2).map(tuple),
    st.none() | _TEXT,
)


def _driver(value: tuple[machine_model.DriverReading, tuple[machine_model.Xid, ...], int | None]) -> None:
    """Whatever the driver reports, every check has a result that can be read on another machine."""
    driver, xids, pci = value
    from envbuild.doctor.cpu_memory_and_os import read

    host = machine_model.Host(
        "a", "2026-11-21T00:00:00Z", read(), driver=driver, pci=pci, log=machine_model.KernelLog(xids)
    )
    checks = machine_checks_and_suitability.check_machine(host, [])
    assert all(isinstance(check, Check) and "\x1b" not in check.detail for check in checks)
    node = node_comparison.parse("a", json.dumps(plain(machine_checks_and_suitability.document(host, checks))))
    assert node.described, node.fault


_XIDS = st.lists(
    st.builds(machine_model.Xid, st.sampled_from((13, 31, 48, 63, 79, 94, 9999)), _TEXT, _TEXT), max_size=3
).map(tuple)

TARGETS = (
    Target("log", files(LOGS, (*_LINES, *_MORE, *BYTES), raw=400), _log, 6),
    Target("packed log", files(PACKED, (PACKED[0], b"\x1f\x8b", *BYTES)), _log, 3),
    Target("Markdown", files(MARKDOWN, (*_MARKS, *BYTES)), _markdown, 68),
    Target("image reference", files(REFERENCES, (*_PARTS, *BYTES)), _reference, 68),
    Target("wheel", _wheels(), _wheel, 9),
    Target("wheel description", json_files([_DESCRIPTION]), _description, 68),
    Target("compiled file", files(_libraries(), (*_FIELDS, *BYTES)), _compiled, 68),
    Target("node", json_files([_NODE]), _node, 68),
    Target("cluster file", yaml_files(_CLUSTER), _cluster, 68),
    Target("kernel log", files(_KERNEL, (b"NVRM: Xid (", b"): 79", b"PCI:", *BYTES)), _kernel, 68),
    Target("driver", st.tuples(_DRIVERS, _XIDS, _NUMBER), _driver, 9),
)
