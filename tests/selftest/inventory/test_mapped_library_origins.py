"""Libraries are judged by the records of distributions; no library is loaded here."""

import base64
import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from envbuild.selftest.inventory import distribution_records, mapped_library_origins


class Site:
    """A site-packages folder that a test fills."""

    def __init__(self, root: Path) -> None:
        self.path = root / "venv" / "lib" / "site-packages"

    def add(self, name: str, version: str, *files: str, record: bool = True) -> None:
        lines = []
        for file in files:
            path = self.path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.encode())
            value = base64.urlsafe_b64encode(hashlib.sha256(file.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={value},{len(file)}\n")
        info = self.path / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if record:
            (info / "RECORD").write_text("".join(lines) + f"{info.name}/RECORD,,\n")

    def take(self, *paths: Path) -> mapped_library_origins.Inventory:
        return mapped_library_origins.take_inventory([str(path) for path in paths], [str(self.path)])


CUBLAS = "nvidia/cublas/lib/libcublas.so.12"
LT = "nvidia/cublas/lib/libcublasLt.so.12"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path.resolve())
    made.add("nvidia_cublas_cu12", "12.5.3.2", CUBLAS, LT)
    return made


def elsewhere(tmp_path: Path, name: str, content: str = "other") -> Path:
    path = tmp_path.resolve() / "usr" / "lib" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_a_library_as_recorded_has_its_distributions_version(site: Site) -> None:
    taken = site.take(site.path / CUBLAS, site.path / LT)
    assert taken.distributions == {"nvidia-cublas-cu12": "12.5.3.2"}
    assert taken.libraries[0].document() == {
        "name": "libcublas.so.12",
        "path": str(site.path / CUBLAS),
        "version": "12.5.3.2",
        "sha256": hashlib.sha256(CUBLAS.encode()).hexdigest(),
        "owner": "nvidia-cublas-cu12==12.5.3.2",
        "record": True,
    }
    assert mapped_library_origins.library_faults(taken) == []


def test_a_modified_library_is_seen(site: Site) -> None:
    (site.path / CUBLAS).write_bytes(b"patched")
    (fault,) = mapped_library_origins.library_faults(site.take(site.path / CUBLAS))
    assert fault == f"{site.path / CUBLAS} is not the file that nvidia-cublas-cu12==12.5.3.2 recorded"


def test_a_library_replaced_after_it_was_mapped_is_seen(site: Site) -> None:
    taken = site.take(Path(f"{site.path / 'torch/lib/libtorch.so'} (deleted)"))
    assert taken.libraries[0].sha256 is None
    assert len(mapped_library_origins.library_faults(taken)) == 1


def test_a_library_in_no_record_is_seen_in_site_packages_only(site: Site, tmp_path: Path) -> None:
    stray = site.path / "torch" / "lib" / "libtorch_cpu.so"
    stray.parent.mkdir(parents=True)
    stray.write_text("stray")
    (fault,) = mapped_library_origins.library_faults(site.take(stray, elsewhere(tmp_path, "libgomp.so.1")))
    assert fault == f"{stray} is not listed in the RECORD of any distribution"


def test_a_foreign_library_outside_the_family_is_ignored(site: Site) -> None:
    other = site.path / "other" / "libother.so"
    other.parent.mkdir()
    other.write_text("other")
    assert mapped_library_origins.library_faults(site.take(other)) == []


def test_a_system_library_that_shadows_the_locked_one_is_seen(site: Site, tmp_path: Path) -> None:
    shadow = elsewhere(tmp_path, "libcublas.so.12.1.3.1")
    (fault,) = mapped_library_origins.library_faults(site.take(shadow))
    assert fault == f"{shadow} is mapped instead of the copy that nvidia-cublas-cu12 installed"


def test_a_system_library_that_no_wheel_brings_is_not(site: Site, tmp_path: Path) -> None:
    assert mapped_library_origins.library_faults(site.take(elsewhere(tmp_path, "libnccl.so.2.19"))) == []


def test_two_copies_and_two_folders_are_seen(site: Site, tmp_path: Path) -> None:
    second = elsewhere(tmp_path, "libcublas.so.11")
    faults = mapped_library_origins.library_faults(site.take(site.path / CUBLAS, second))
    assert f"libcublas is mapped 2 times: {site.path / CUBLAS}, {second}" in faults
    assert any(fault.startswith("cublas is mapped from several folders") for fault in faults)


def test_the_parts_of_cudnn_come_from_one_folder(site: Site, tmp_path: Path) -> None:
    site.add("nvidia_cudnn_cu12", "9.1.0.70", "nvidia/cudnn/lib/libcudnn.so.9")
    part = elsewhere(tmp_path, "libcudnn_engines_tensor_ir.so.9")
    faults = mapped_library_origins.library_faults(site.take(site.path / "nvidia/cudnn/lib/libcudnn.so.9", part))
    assert [fault.split(":")[0] for fault in faults] == ["cudnn is mapped from several folders"]


def test_the_first_distribution_of_a_name_counts(site: Site, tmp_path: Path) -> None:
    later = Site(tmp_path / "later")
    later.add("nvidia_cublas_cu12", "12.1.3.1", CUBLAS)
    taken = mapped_library_origins.take_inventory([], [str(site.path), str(later.path)])
    assert taken.distributions == {"nvidia-cublas-cu12": "12.5.3.2"}


@pytest.mark.parametrize("version", ["12.1.3.1", "12.5.3.2"])
def test_the_matching_one_of_two_records_names_the_owner(site: Site, version: str) -> None:
    """One of the records is left over from an upgrade; the result must not depend on the order in which the folder
    lists the records."""
    for info in site.path.glob("*.dist-info"):
        shutil.rmtree(info)
    for other in ("12.1.3.1", "12.5.3.2"):
        site.add("nvidia_cublas_cu12", other, CUBLAS)
        record = site.path / f"nvidia_cublas_cu12-{other}.dist-info" / "RECORD"
        if other != version:
            record.write_text(f"{CUBLAS},sha256={'A' * 43},1\n")
    (library,) = site.take(site.path / CUBLAS).libraries
    assert (library.version, library.record) == (version, True)


def test_a_distribution_without_record_owns_nothing(site: Site) -> None:
    site.add("other_dist", "1", "torch/lib/libtorch.so", record=False)
    taken = site.take(site.path / "torch/lib/libtorch.so")
    assert (taken.libraries[0].owner, taken.libraries[0].record) == ("unowned", None)
    assert taken.distributions["other-dist"] == "1"


def test_a_library_reached_through_a_link_is_owned(site: Site, tmp_path: Path) -> None:
    """uv can install by links into its cache: the kernel then names the file in the cache."""
    real = elsewhere(tmp_path, "libcublas-in-cache.so", CUBLAS)
    (site.path / CUBLAS).unlink()
    (site.path / CUBLAS).symlink_to(real)
    assert site.take(real).libraries[0].record is True


def test_maps_are_read_once_each_and_with_spaces() -> None:
    maps = (
        "7f00-7f01 r--p 00000000 08:01 11  /usr/lib/libc.so.6\n"
        "7f01-7f02 r-xp 00001000 08:01 11  /usr/lib/libc.so.6\n"
        "7f02-7f03 r--p 00000000 08:01 12  /opt/a b/libtorch.so (deleted)\n"
        "7f03-7f04 rw-p 00000000 00:00 0 \n"
        "7f04-7f05 rw-p 00000000 00:00 0   [heap]\n"
        "7f05-7f06 r--p 00000000 08:01 13  /usr/bin/python3.11\n"
        "7f06-7f07 r--p 00000000 08:01 14  /a.so.d/data.bin\n"
    )
    assert mapped_library_origins.mapped_paths(maps) == ("/opt/a b/libtorch.so (deleted)", "/usr/lib/libc.so.6")


def test_this_processs_own_libraries_are_mapped() -> None:
    assert any(Path(path).name.startswith("libc.so") for path in mapped_library_origins.mapped())


def test_found_lists_files_mapped_or_not(site: Site) -> None:
    (site.path / "link.so").symlink_to(site.path / CUBLAS)
    (site.path / "gone.so").symlink_to(site.path / "nowhere")
    assert mapped_library_origins.libraries_below([str(site.path)]) == (str(site.path / CUBLAS), str(site.path / LT))


@pytest.mark.parametrize(("name", "same"), [("Nvidia_cuBLAS.cu12", "nvidia-cublas-cu12"), ("torch", "torch")])
def test_names_are_compared_as_pep_503_says(name: str, same: str) -> None:
    assert distribution_records.normalise(name) == same


def test_every_record_here_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the installed torch: its own library is owned, and its hash is the recorded one."""
    import torch

    library = os.path.realpath(Path(torch.__file__).parent / "lib" / "libc10.so")
    (taken,) = mapped_library_origins.take_inventory([library]).libraries
    assert (taken.record, taken.owner.split("==")[0]) == (True, "torch"), sys.path


def test_only_new_libraries_are_hashed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first, hashed = site.take(site.path / CUBLAS), []
    whole = site.take(site.path / CUBLAS, site.path / LT)
    real = distribution_records.file_sha256
    monkeypatch.setattr(distribution_records, "file_sha256", lambda path: hashed.append(path) or real(path))
    monkeypatch.setattr(
        distribution_records, "found_distributions", lambda path_entries: pytest.fail("RECORDs are read again")
    )
    assert mapped_library_origins.more(first, [str(site.path / CUBLAS), str(site.path / LT)]) == whole
    assert hashed == [str(site.path / LT)]
