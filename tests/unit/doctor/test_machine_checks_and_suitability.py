"""The result of the checks for a machine that was read completely or partly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envbuild.doctor import (
    cpu_memory_and_os,
    engine_disk_and_network_checks,
    gpu_checks,
    machine_checks_and_suitability,
)
from envbuild.doctor.machine_readings import Answer, DriverReading, Ecc, GpuReading, Host, SiteReading
from envbuild.doctor.profile_hardware_needs import Need


def host(*names: str, version: str = "550.54.15", late: tuple[str, ...] = ()) -> Host:
    found = [
        GpuReading(index, name, "", "", "9.0", 96 << 30, 96 << 30, None, Ecc(), None, None)
        for index, name in enumerate(names)
    ]
    return Host("node", "", cpu_memory_and_os.unread(), DriverReading(version, "12.4", tuple(found)), late=late)


def test_a_value_not_read_in_time_is_neither_good_nor_absent() -> None:
    found = {
        check.id: check
        for check in machine_checks_and_suitability.check_machine(host("NVIDIA H20", late=("the kernel",)), [])
    }
    for id in ("gpu.xid", "gpu.fabric", "shm", "rdma", "ca"):
        assert (found[id].status, found[id].detail) == ("skipped", "not read in time"), id


H20, CPU = Need("h20", ("h20",), driver="525.60.13"), Need("cpu", ())


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ([H20], "550.54.15 (CUDA up to 12.4); h20 is not for these GPUs"),
        ([H20, CPU], "550.54.15 (CUDA up to 12.4); no profile is for these GPUs"),
        ([], "550.54.15 (CUDA up to 12.4); no profile is for these GPUs"),
    ],
)
def test_no_more_profiles_are_spoken_of_than_were_asked_for(needs: list[Need], words: str) -> None:
    assert gpu_checks.check_driver(host("NVIDIA A100-SXM4-80GB"), needs).detail == words


@pytest.mark.parametrize(
    ("card", "id", "brought"), [("NVIDIA H200", "h200", True), ("NVIDIA GeForce RTX 4090", "rtx4090", False)]
)
def test_compatibility_libraries_are_advised_where_gpus_take_them(card: str, id: str, brought: bool) -> None:
    found = gpu_checks.check_driver(host(card), [Need("mine", (id,), driver="580")])
    assert found.status == "fail"
    assert ("compatibility libraries" in str(found.remedy)) == brought


def test_the_index_that_fails_is_named_and_the_others_are_cleared() -> None:
    silent, fine = (
        Answer("https://a.example/simple", fault="no answer in time"),
        Answer("https://b.example/simple", 200),
    )
    one = engine_disk_and_network_checks.check_reached("index", (silent, fine, fine), late=False, remedy="")
    assert one.detail == "https://a.example/simple: no answer in time (the other 2 answer)"
    both = engine_disk_and_network_checks.check_reached("index", (silent, silent), late=False, remedy="")
    assert "are well" not in both.detail
    assert (
        "pip did not report" in engine_disk_and_network_checks.check_reached("index", (), late=True, remedy="").detail
    )


@pytest.mark.parametrize(("clusters", "status"), [((), "fail"), (("slurm",), "warn")])
def test_the_registry_of_a_cluster_replaces_a_missing_engine(clusters: tuple[str, ...], status: str) -> None:
    login = Host(
        "node", "", cpu_memory_and_os.unread(), site=SiteReading("config.yaml", clusters_with_registry=clusters)
    )
    engine = engine_disk_and_network_checks.check_engine(login)
    buildx = engine_disk_and_network_checks.check_buildx(login)
    assert (engine.status, buildx.status) == (status, status)
    assert ("with --on slurm, the registry of the cluster" in engine.detail) is bool(clusters)
    old = replace(login, engine=replace(login.engine, version="26.1.5"))
    assert engine_disk_and_network_checks.check_buildx(old).status == "fail", "an engine that is there builds with it"
    suits = machine_checks_and_suitability.suits(login, Need("cpu", ()), [engine, buildx])
    assert (suits.status, "engine: " in suits.detail) == ("fail", True), "nothing can be built or tested here"
