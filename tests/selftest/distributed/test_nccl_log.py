"""Reads NCCL's log in NCCL's own format: the lines are from public threads, which are cited next to them."""

import pytest

from envbuild.selftest.distributed import nccl_log
from envbuild.selftest.distributed.nccl_log import NcclLog, read

# NVIDIA/nccl#1189
H20 = """\
H20-GPU-06:4015540:4015653 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
H20-GPU-05:1789225:1789736 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM
H20-GPU-06:4015539:4015652 [0] NCCL INFO 8 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p \
channels per peer
H20-GPU-05:1789225:1789736 [1] NCCL INFO comm 0x5a0ca40 rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 38000 commId \
0xf021d9037f9243d8 - Init COMPLETE
"""
# tinygrad/open-gpu-kernel-modules#45
RTX4090 = """\
i-56butc28zq2jtjaluzq7va7p6:9822:9822 [0] NCCL INFO Bootstrap: Using bond0:10.0.11.5<0>
i-56butc28zq2jtjaluzq7va7p6:9822:9822 [0] NCCL INFO cudaDriverVersion 12080
i-56butc28zq2jtjaluzq7va7p6:9822:9822 [0] NCCL INFO NCCL version 2.26.5+cuda12.9
"""
# NVIDIA/nccl#1605
H100 = """\
myhost:2261199:2261199 [0] NCCL INFO Bootstrap : Using eth0:10.4.167.14<0>
myhost:2261199:2261199 [0] NCCL INFO cudaDriverVersion 12040
NCCL version 2.21.5+cuda12.4
myhost:2261199:2261199 [0] NCCL INFO Comm config Blocking set to 0
"""
# pytorch/ci-infra#490: /dev/shm of 64 MB
SHM_FULL = """\

[2026-04-22 21:34:20] mt-l-x86iavx512-45-172-t4-4-csmpw-runner-g4sfw-workflow:202016:202235 [0] misc/shmutils.cc:88 \
NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)
mt-l-x86iavx512-45-172-t4-4-csmpw-runner-g4sfw-workflow:202016:202235 [0] NCCL INFO transport/shm.cc:551 -> 2
"""


@pytest.mark.parametrize(
    ("line", "edge"),
    [
        # NVIDIA/nccl#952, NVIDIA/nccl#892, aws/aws-ofi-nccl#715
        ("host:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read", "p2p"),
        ("036260b61d3a:33347:33367 [7] NCCL INFO Channel 15/0 : 7[7] -> 4[4] via P2P/direct pointer", "p2p"),
        ("algo-1:18058:18132 [1] NCCL INFO Channel 04/0 : 1[1] -> 0[0] via P2P/CUMEM/read", "p2p"),
        # NVIDIA/nccl-tests#166
        ("ubuntu:39964:40050 [6] NCCL INFO Channel 09 : 6[6] -> 7[7] via SHM/direct/direct", "shm"),
        ("ubuntu:9621:9692 [7] NCCL INFO Channel 14/0 : 15[7] -> 0[0] [send] via NET/Socket/0", "socket"),
        # NVIDIA/nccl#707: bus ids, as until NCCL 2.18; NVIDIA/nccl#1814: a plug-in's name
        ("10-90-43-152:120890:121560 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA",
         "ib"),
        ("hostname-test:984:1257 [4] NCCL INFO Channel 06/0 : 36[4] -> 20[4] [send] via NET/IBext_v8/3", "ib"),
        ("algo-1:18059:18136 [2] NCCL INFO Channel 01/0 : 2[2] -> 10[2] [send] via NET/AWS Libfabric/1/GDRDMA", "net"),
        # no edges: NVIDIA/nccl#1814, NVIDIA/nccl-tests#188
        ("hostname-test:984:984 [4] NCCL INFO Bootstrap : Using bond0:172.36.134.184<0>", None),
        ("user:16899:16949 [0] NCCL INFO Channel 00/02 :    0   1   2   3   4   5   6   7   8  15  14  13  12", None),
    ],
)  # fmt: skip
def test_the_edge_of_a_channel(line: str, edge: str | None) -> None:
    assert read(line).edges == ((edge,) if edge else ())


def test_several_transports_come_in_their_order() -> None:
    assert read(H20).transports == ("p2p", "ib")


@pytest.mark.parametrize(
    ("line", "nvls"),
    [
        # aws-samples/aws-do-eks, nccl-test/README.md, on p5.48xlarge (eight H100)
        ("test-nccl-efa-worker-0:23:75 [3] NCCL INFO 24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p "
         "channels per peer", True),
        # NVIDIA/nccl#892, on H800
        ("036260b61d3a:33347:33366 [6] NCCL INFO 16 coll channels, 0 nvls channels, 16 p2p channels, 16 p2p channels "
         "per peer", False),
        # NVIDIA/nccl#1357, on H100
        ("qh100-gpu20:39633:39689 [4] NCCL INFO NVLS multicast support is available on dev 4", False),
    ],
)  # fmt: skip
def test_nvls_is_there_where_it_has_channels(line: str, nvls: bool) -> None:
    assert read(line).nvls is nvls
    assert read(line).transports == (("nvls",) if nvls else ())


@pytest.mark.parametrize(("text", "version"), [(RTX4090, "2.26.5"), (H100, "2.21.5"), (H20, None)])
def test_the_version_is_nccls_own(text: str, version: str | None) -> None:
    assert read(text).version == version


def test_warnings_are_kept_once_and_bounded() -> None:
    (warning,) = read(SHM_FULL * 3).warnings
    assert warning.startswith("Error: failed to extend /dev/shm/nccl-WU88OE") and warning.endswith(
        "No space left on device (28)"
    )
    (warning,) = read("a:1:2 [0] b.cc:1 NCCL WARN " + "x" * 5000).warnings
    assert len(warning) == 300


def test_a_log_that_says_nothing() -> None:
    assert read("") == NcclLog()
    assert read("via P2P/CUMEM, says another program").transports == ()


P2P = NcclLog(edges=("p2p",))


@pytest.mark.parametrize(
    ("required", "log", "words"),
    [
        ("p2p", P2P, None),
        ("p2p", NcclLog(edges=("p2p",), nvls=True), None),
        ("nvls", NcclLog(edges=("p2p",), nvls=True), None),
        ("shm", NcclLog(edges=("shm",)), None),
        ("p2p", NcclLog(edges=("shm",)), "nccl 0+1 uses shm, the profile requires p2p"),
        ("p2p", NcclLog(edges=("p2p", "shm")), "nccl 0+1 uses p2p, shm, the profile requires p2p"),
        ("ib", NcclLog(edges=("socket",)), "nccl 0+1 uses socket, the profile requires ib"),
        ("nvls", P2P, "nccl 0+1 uses p2p, the profile requires nvls"),
        ("p2p", NcclLog(), "nccl 0+1 uses no transport that its log names, the profile requires p2p"),
    ],
)
def test_a_required_transport_holds_for_every_edge(required: str, log: NcclLog, words: str | None) -> None:
    assert nccl_log.objection(required, [("nccl 0+1", log)]) == words
    assert nccl_log.objection(required, [("nccl 0+1", log), ("nccl 0+2", log)]) == words


def test_the_first_stage_that_does_otherwise_is_named() -> None:
    message = nccl_log.objection(
        "p2p", [("nccl 0+1", P2P), ("nccl 0+2", NcclLog(edges=("shm",))), ("nccl 1+2", NcclLog())]
    )
    assert message == "nccl 0+2 uses shm, the profile requires p2p"
    assert nccl_log.objection("p2p", []) is None
