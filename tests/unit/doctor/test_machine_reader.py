"""Data read from a machine: limited, cleaned, without secrets, and with a time limit."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from envbuild.doctor import (
    cpu_memory_and_os,
    disk_shm_and_cuda_software_reader,
    kernel_log_reader,
    machine_reader,
    pci_nvswitch_and_rdma_reader,
)
from envbuild.doctor.machine_readings import MAX_TEXT, KernelLog, Port, Xid, clean, short_address
from envbuild.doctor.parallel_tasks_with_time_limit import run_in_parallel


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://index.example/simple", "https://index.example/simple"),
        ("https://user:word@index.example:8443/simple/", "https://index.example:8443/simple/"),
        ("https://user:wo/rd@index.example/simple", "https://index.example/simple"),
        ("https://user:w@rd@index.example/simple", "https://index.example/simple"),
        ("https://index.example/simple?token=word#word", "https://index.example/simple"),
        ("unix:///var/run/docker.sock", "unix:///var/run/docker.sock"),
        ("ssh://me@host", "ssh://host"),
        ("/opt/wheels", "/opt/wheels"),
        ("http://[::1", "http://[::1"),
    ],
)
def test_an_address_is_shown_without_its_secrets(address: str, shown: str) -> None:
    assert short_address(address) == shown


def test_words_of_others_are_one_bounded_line() -> None:
    assert clean("a\n\tb\x1b[2J") == "a b\N{REPLACEMENT CHARACTER}[2J"
    assert len(clean("x" * 10**6)) == MAX_TEXT


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("NVRM: Xid (PCI:0000:1a:00): 79, pid=7, GPU has fallen", Xid(79, "0000:1a:00", "pid=7, GPU has fallen")),
        ("[12.5] NVRM: Xid (0000:1a:00): 31, Ch 1", Xid(31, "0000:1a:00", "Ch 1")),
        ("4,1,2,-;NVRM: Xid (PCI:0000:1a:00): 45", Xid(45, "0000:1a:00", "")),
    ],
)
def test_an_xid_is_read_in_any_form_of_the_log(line: str, found: Xid) -> None:
    assert kernel_log_reader.parse_xids(f"before\n{line}\nafter\n".encode()) == [found]


@pytest.mark.parametrize("line", ["NVRM: Xid", "NVRM: Xid (): 79", "NVRM: Xid (PCI:0000:1a:00): 99999", "xid 79"])
def test_an_unknown_xid_is_none(line: str) -> None:
    assert kernel_log_reader.parse_xids(line.encode()) == []


def test_a_log_full_of_them_gives_the_newest() -> None:
    lines = [f"NVRM: Xid (PCI:0000:1a:00): {number % 1000}, x\n" for number in range(5000)]
    found = kernel_log_reader.parse_xids("".join(lines).encode())
    assert len(found) == kernel_log_reader.MAX_XIDS
    assert found[-1].number == 999


def test_an_unreadable_log_is_reported(tmp_path: Path) -> None:
    assert kernel_log_reader.log(tmp_path).fault == "/dev/kmsg: No such file or directory"


def kernel_log(root: Path) -> Path:
    (root / "dev").mkdir()
    return root / "dev" / "kmsg"


@pytest.mark.parametrize("size", [kernel_log_reader.MAX_LOG, 3 * kernel_log_reader.MAX_LOG])
def test_the_newest_part_of_a_large_log_is_read(tmp_path: Path, size: int) -> None:
    first, last = (f"NVRM: Xid (PCI:0000:1a:00): {number}, x\n".encode() for number in (31, 79))
    kernel_log(tmp_path).write_bytes(first + b"usb 1-1: new device\n" * (size // 20) + last)
    assert [xid.number for xid in kernel_log_reader.log(tmp_path).xids] == [79]


def test_a_log_that_grows_faster_than_it_is_read(tmp_path: Path) -> None:
    kernel_log(tmp_path).symlink_to("/dev/zero")
    begin = time.monotonic()
    assert kernel_log_reader.log(tmp_path) == KernelLog(partial=True)
    assert time.monotonic() - begin < machine_reader.SECONDS


def test_a_log_whose_reading_fails_is_not_taken_for_a_log_without_errors(tmp_path: Path) -> None:
    kernel_log(tmp_path).mkdir()
    assert kernel_log_reader.log(tmp_path) == KernelLog(partial=True)


def test_a_log_that_has_no_end_is_not_waited_for(tmp_path: Path) -> None:
    file = kernel_log(tmp_path)
    os.mkfifo(file)
    writer = os.open(file, os.O_RDWR)
    os.write(writer, b"4,1,2,-;NVRM: Xid (PCI:0000:1a:00): 79, x\n")
    assert kernel_log_reader.log(tmp_path) == KernelLog((Xid(79, "0000:1a:00", "x"),))
    os.close(writer)


def test_a_machine_without_anything_is_read_all_the_same(tmp_path: Path) -> None:
    assert pci_nvswitch_and_rdma_reader.pci(tmp_path) is None
    assert pci_nvswitch_and_rdma_reader.fabric_manager(tmp_path) is None
    assert disk_shm_and_cuda_software_reader.shm_bytes(tmp_path) == 0
    assert list(pci_nvswitch_and_rdma_reader.rdma_ports(tmp_path)) == []
    assert not pci_nvswitch_and_rdma_reader.switches(tmp_path)
    assert cpu_memory_and_os.read(tmp_path).cpu == "unknown CPU"
    assert cpu_memory_and_os.read(tmp_path).memory == 0


def test_the_kernels_files_are_read(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    put("proc/cpuinfo", "processor\t: 0\nmodel name\t: a processor\nmodel name\t: another\n")
    put("proc/meminfo", "MemTotal:       1024 kB\n")
    put("proc/2/comm", "kthreadd\n")
    put("proc/77/comm", "nv-fabricmanage\n")
    put("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    put("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n")
    put("sys/class/infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)\n")
    for address, vendor, kind in (
        ("01", "10de", "0300"),
        ("02", "10de", "0302"),
        ("03", "10de", "0403"),
        ("04", "1002", "0300"),
    ):
        put(f"sys/bus/pci/devices/{address}/vendor", f"0x{vendor}\n")
        put(f"sys/bus/pci/devices/{address}/class", f"0x{kind}00\n")
    assert (cpu_memory_and_os.read(tmp_path).cpu, cpu_memory_and_os.read(tmp_path).memory) == (
        "a processor",
        1 << 20,
    )
    assert pci_nvswitch_and_rdma_reader.fabric_manager(tmp_path) is True
    assert list(pci_nvswitch_and_rdma_reader.rdma_ports(tmp_path)) == [
        Port("mlx5_0/1", "ACTIVE", "Ethernet", "100 Gb/sec (4X EDR)")
    ]
    assert pci_nvswitch_and_rdma_reader.pci(tmp_path) == 2


# tests of `disks`: the disk of the cache folder


def test_a_missing_cache_folder_is_judged_by_its_parent_and_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    [disk] = disk_shm_and_cuda_software_reader.disks(None)
    assert (disk.folder, disk.fault) == (str(tmp_path / "cache" / "envbuild" / "wheels"), None)
    assert disk.free > 0 and disk.device == tmp_path.stat().st_dev
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["cache", "cache/envbuild", "cache/envbuild/wheels"])
def test_a_file_in_place_of_the_cache_folder_is_a_fault(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    [disk] = disk_shm_and_cuda_software_reader.disks(None)
    assert disk.fault == "Not a directory"


def test_a_cache_folder_that_cannot_be_created_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root may write everywhere, so os.access refuses here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        [disk] = disk_shm_and_cuda_software_reader.disks(None)
    assert (disk.folder, disk.fault) == (str(tmp_path), "Permission denied")


def test_a_cache_folder_on_a_read_only_file_system_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root may mount a file system read-only, so os.statvfs and os.access report one here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda folder, statvfs=os.statvfs: read_only(statvfs(folder)))
        patched.setattr(os, "access", lambda *_: False)
        [disk] = disk_shm_and_cuda_software_reader.disks(None)
    assert (disk.folder, disk.fault) == (str(tmp_path), "Read-only file system")


def read_only(found: os.statvfs_result) -> os.statvfs_result:
    values = list(found)
    values[8] |= os.ST_RDONLY  # f_flag
    return os.statvfs_result(values)


@pytest.mark.parametrize("path", ["cache", "cache/envbuild", "cache/envbuild/wheels"])
def test_a_cache_folder_that_is_a_link_to_a_missing_folder_is_a_fault(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).symlink_to(tmp_path / "scratch")
    [disk] = disk_shm_and_cuda_software_reader.disks(None)
    assert (disk.folder, disk.fault) == (str(tmp_path / path), f"symbolic link to the missing {tmp_path}/scratch")
    (tmp_path / "scratch").mkdir()
    [disk] = disk_shm_and_cuda_software_reader.disks(None)
    assert disk.fault is None


# readers that run at the same time


def test_a_task_that_takes_too_long_gives_none_and_the_others_finish() -> None:
    never = threading.Event()
    begin = time.monotonic()
    assert run_in_parallel([lambda: 1, lambda: never.wait(60) and 2, lambda: 3], 0.3) == [1, None, 3]
    assert time.monotonic() - begin < 1.5
    never.set()


def test_an_exception_of_a_task_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_parallel([lambda: 1, lambda: 1 // 0], 5)
