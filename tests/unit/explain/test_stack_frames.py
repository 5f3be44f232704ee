"""`explain`: stack frames, exit statuses and localized messages as facts."""

from __future__ import annotations

import pytest

from envbuild.explain import cause_ranking, localized_message_translation, log_reader_and_search, stack_frames

H20 = "PyTorch version: 2.3.0+cu121\nGPU 0: NVIDIA H20\npython train.py\n"
FPE = "Program received signal SIGFPE, Arithmetic exception.\n"


def read(text: str) -> stack_frames.Stacks:
    return stack_frames.read(log_reader_and_search.Log(text.encode()))


def causes(text: str) -> list[str]:
    return [match.id for match in cause_ranking.explain(log_reader_and_search.Log(text.encode())).matches]


@pytest.mark.parametrize(
    ("text", "component"),
    [
        (FPE + "#0  0x1 in mkl_vml_serv_GetMinN () from /v/torch/lib/libtorch_cpu.so\n", "cpu-math"),
        (FPE + "#0  0x1 in ?? ()\n   from /v/nvidia/cublas/lib/libcublasLt.so.12\n", "cublas"),
        ("stop reason = signal SIGSEGV\n  * frame #0: 0x1 libopenblas.0.dylib`exec_blas + 95\n", "cpu-math"),
        ("Caught signal 8 (x)\n==== backtrace ====\n 1 0x00a0bc59 cublasLtMatmulAlgoCheck()  ???:0\n", "cublas"),
        ("Signal: Segmentation fault (11)\n[h:1] [ 0] /lib/libmkl_core.so.2(+0x3f)[0x7f1]\n", "cpu-math"),
        ("traps: python[7] trap divide error ip:7f sp:7f error:0 in libcublasLt.so.12[7f0+1]\n", "cublas"),
        (
            "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
            '  File "/v/threading.py", line 3 in wait\n\nCurrent thread 0x2 (most recent call first):\n'
            '  File "/v/site-packages/numpy/linalg/linalg.py", line 9 in svd\n',
            "cpu-math",
        ),
        (
            "Process 9 (python) dumped core: terminated with signal SIGSEGV\n"
            "#0  0x00007f n/a (libnccl.so.2 + 0x1234)\n#1  0x00007f n/a (libc.so.6 + 0x9)\n",
            "nccl",
        ),
        (
            FPE + "#0  0x1 in raise ()\n   from /lib/libc.so.6\n#1  0x2 in abort ()\n   from /lib/libc.so.6\n"
            "#2  0x3 in ?? ()\n   from /v/nvidia/cublas/lib/libcublasLt.so.12\n",
            "cublas",
        ),
        (FPE + "#0  0x1 in decode_frame () from /usr/lib/libavcodec.so.58\n", stack_frames.OTHER),
        (FPE + "#0  0x1 in decode_frame (x=1) at C:\\src\\decode.c:12\n", stack_frames.OTHER),
    ],
)  # fmt: skip
def test_the_library_of_the_innermost_frames(text: str, component: str) -> None:
    assert read(text).crashed_in == {component}


def test_neutral_frames_decide_nothing() -> None:
    assert read(FPE + "#0  0x1 in raise () from /lib64/libc.so.6\n#1  0x2 in abort () from /lib64/libc.so.6\n") == (
        stack_frames.Stacks()
    )


def test_a_signal_of_the_cpu_math_library_is_not_given_to_cublas() -> None:
    assert "cublas-hopper-fpe" in causes(H20 + FPE)
    in_cublas = H20 + FPE + "#0  0x1 in ?? () from /v/libcublasLt.so.12\n"
    assert causes(in_cublas) == ["cublas-hopper-fpe"]
    for library in ("libmkl_avx512.so.2", "libopenblas.so.0", "libdnnl.so.3", "libgomp.so.1", "libavcodec.so.58"):
        assert "cublas-hopper-fpe" not in causes(H20 + FPE + f"#0  0x1 in f () from /usr/lib/{library}\n"), library


def test_a_stack_without_a_signal_is_of_a_hang() -> None:
    waiting = 'Thread 1 (idle): "MainThread"\n    {}\n    train (train.py:3)\n'
    assert read(waiting.format("wait (threading.py:3)")).hang
    assert causes(waiting.format("all_reduce (torch/distributed/distributed_c10d.py:9)")) == ["collective-timeout"]
    assert causes(waiting.format("_try_get_data (torch/utils/data/dataloader.py:9)")) == ["dataloader-stalled"]
    assert not read(FPE + waiting.format("f (a.py:1)")).hang


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("      Exit Code:    136", "SIGFPE"),
        ("exit code: 134", "SIGABRT"),
        ("exited with code 139", "SIGSEGV"),
        ("srun: error: n1: task 0: Exited with exit code 136", "SIGFPE"),
        ("Exited (136) 3 minutes ago", "SIGFPE"),
        ("  exitcode  : -8 (pid: 71)", "SIGFPE"),
        ('"ExitCode": 137,', "SIGKILL"),
        ("123.batch  python  gpu  FAILED      0:8", "SIGFPE"),
        ("Process died with signal: 11", "SIGSEGV"),
        ("finished with exit status 132", "SIGILL"),
        ("Command 'python train.py' returned non-zero exit status -9.", "SIGKILL"),
        ("DataLoader worker (pid(s) 1) exited unexpectedly with exit code -11. Details are lost", "SIGSEGV"),
        ("Main process exited, code=dumped, status=11/SEGV", "SIGSEGV"),
        ("make: *** [Makefile:3: train] Error 137", "SIGKILL"),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "SIGKILL"),
        ("mpirun noticed that process rank 3 exited on signal 7 (Bus error).", "SIGBUS"),
        ("The command '/bin/sh -c python x.py' returned a non-zero code: 139", "SIGSEGV"),
        ("job failed, rc=-6", "SIGABRT"),
        ("+ exit 136", "SIGFPE"),
    ],
)
def test_an_exit_status_names_its_signal(text: str, ended: str) -> None:
    assert f"[ended by {ended}]" in localized_message_translation.rewritten(text)


@pytest.mark.parametrize(
    "text",
    [
        "exit code: 0",
        "exit code 1",
        "exited with 2",
        "step 136",
        "error code 136.5",
        "exit code 1.37",
        "rc=1",
        "rc: 12",
        "make: *** [Makefile:12: all] Error 1",
        "code=exited, status=9/n/a",
        "returned a non-zero code: 1",
        "exit 1",
    ],
)
def test_other_numbers_are_left(text: str) -> None:
    assert localized_message_translation.rewritten(text) == text


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("H20, torch 2.3.0\n浮点数例外 (核心已转储)\n", "cublas-hopper-fpe"),
        ("H20, torch 2.3.0\nGleitkomma-Ausnahme (Speicherabzug geschrieben)\n", "cublas-hopper-fpe"),
        ("run.sh: line 3: 4711 已杀死               python train.py\n", "host-memory"),
        ("libcudart.so.12: 无法打开共享对象文件: 没有那个文件或目录\n", "library-not-found"),
        ("libcudnn.so.8: 共有オブジェクトファイルを開けません\n", "library-not-found"),
        ("OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar\n", "disk-full"),
        ("RuntimeError: Adresse déjà utilisée\n", "port-in-use"),
        ("H20, torch 2.3.0\nИсключение в операции с плавающей точкой\n", "cublas-hopper-fpe"),
        ("libcudart.so.12: невозможно открыть разделяемый объектный файл: Нет такого файла или каталога\n",
         "library-not-found"),
        ("libcudart.so.12: 동적 오브젝트 파일을 열 수 없습니다\n", "library-not-found"),
        ("run.sh: línea 3: 4711 Matado                  python train.py\n", "host-memory"),
        ("run.sh: ligne 3 : 4711 Tué                     python train.py\n", "host-memory"),
        ("run.sh: 행 3번: 4711 죽었음                  python train.py\n", "host-memory"),
        ("[1]+  Getötet                 python train.py\n", "host-memory"),
        ("NCCL WARN socketPoll: Connect to 10.0.0.2<4711> failed : Keine Route zum Zielrechner\n", "nccl-network"),
        ("NCCL WARN socketPoll: Connect to 10.0.0.2<4711> failed : Сеть недоступна\n", "nccl-network"),
        ("OSError: 磁碟配額已滿: 'checkpoint.pt'\n", "disk-full"),
    ],
)  # fmt: skip
def test_localized_messages_are_read_as_the_english_ones(text: str, cause: str) -> None:
    assert causes(text) == [cause]


@pytest.mark.parametrize(
    ("text", "english"),
    [
        ("Ошибка сегментации  (образ памяти сброшен на диск)", "Segmentation fault (core dumped"),
        ("Недопустимая инструкция", "Illegal instruction"),
        ("Ошибка шины", "Bus error"),
        ("Adressierungsfehler (Speicherabzug geschrieben)", "Segmentation fault (core dumped)"),
        ("セグメンテーションフォルト (コアダンプ)", "Segmentation fault (core dumped)"),
        ("명령어가 잘못됨", "Illegal instruction"),
        ("無效指令 (核心已傾印)", "Illegal instruction (core dumped)"),
        ("Invalid: В соединении отказано", "Invalid: Connection refused"),
        ("send: Die Verbindung wurde vom Kommunikationspartner zurückgesetzt", "Connection reset by peer"),
        ("fork: 자원이 일시적으로 사용 불가능함", "fork: Resource temporarily unavailable"),
        ("getaddrinfo: Nom ou service inconnu", "getaddrinfo: Name or service not known"),
        ("5 morto python", "5 morto python"),
    ],
)
def test_a_system_message_is_translated(text: str, english: str) -> None:
    assert english in log_reader_and_search.plain_form(text, of_gpu=True)


def test_a_shown_line_is_as_the_log_has_it() -> None:
    (match,) = cause_ranking.explain(log_reader_and_search.Log("已杀死\n".encode())).matches
    assert match.lines[0].text == "已杀死"


@pytest.mark.parametrize(
    ("text", "torch", "cuda"),
    [
        ("- PyTorch version (GPU?): 2.1.0+cu118 (True)", "2.1.0+cu118", "11.8"),
        ("torch version .................... 2.3.1\ntorch cuda version ............... 12.1", "2.3.1", "12.1"),
        ("We use torch 2.3.1 and it dies", "2.3.1", "12.1"),
        ("on PyTorch 2.1.0 with CUDA 12.1", "2.1.0", "12.1"),
        ("it works with torch 2.4.0, you may upgrade to torch 2.5.1; flash-attn requires torch 2.2.0", None, None),
    ],
)
def test_installed_versions(text: str, torch: str | None, cuda: str | None) -> None:
    situation = cause_ranking.explain(log_reader_and_search.Log(text.encode())).read.situation
    assert (situation.torch, situation.cuda) == (torch, cuda)
