"""`explain`: what people state in prose."""

from __future__ import annotations

import pytest

from envbuild.explain import cause_ranking, cause_scoring, prose_statements
from envbuild.explain.log_reader_and_search import Log
from envbuild.facts import fact_file_reader, log_signatures
from envbuild.util.errors import FactsError


def statements(text: str) -> set[str]:
    return set(prose_statements.ProseReader(Log(text.encode())).statements())


def causes(text: str) -> list[str]:
    return [match.id for match in cause_ranking.explain(Log(text.encode())).matches]


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("all MPI ranks run on the same GPU", "processes-on-one-gpu"),
        ("所有进程都用同一张卡", "processes-on-one-gpu"),
        ("multi-gpu run fails\nset_device(local_rank) fixes it", "works-with-gpu-by-rank"),
        ("cuInit failed: initialization error\nin a forked process", "not-initialized-after-fork"),
        ("it hangs at the barrier\nrank 1 and 2 never print their loss", "rank-never-prints"),
        ("卡住了，后面是 barrier\n其他进程没有打印日志", "rank-never-prints"),
        ("gloo timed out\nthe GPUs get a different number of samples", "uneven-times-out"),
        ("GPU usage jumps between 0% and 100%\nthe images are on NFS", "use-alternates-on-slow-storage"),
        ("the GPU is hardly used\n'worker_num': 0", "workers-zero-and-gpu-idle"),
        ("GPU利用率很低\nloader_workers: 0", "workers-zero-and-gpu-idle"),
        ("one epoch is slow, because the number of workers is 0", "workers-zero-blamed"),
        ("the GPUs are idle between iterations\nthe data set is on a network drive", "idle-between-iterations"),
        ("training is slow: reading images from Lustre is slow", "slow-storage-reads"),
        ("it stopped with an error\nyour card does not have enough memory for this", "gpu-lacks-memory"),
        ("training is very slow on your CPU\nset CUDA_VISIBLE_DEVICES=0 to use the GPU", "slow-on-cpu-until-variable"),
        ("while training, the host's RAM slowly fills up", "memory-rises"),
        ("training got 5x faster after I moved the images to the SSD", "faster-on-other-storage"),
        ("把数据放到固态硬盘之后快了很多", "faster-on-other-storage"),
        ("memory went from 8 GB to 20 GB after 500 steps and then it was out of memory", "memory-amounts-until-full"),
        ("it hangs\nit gets stuck when more than two GPUs are used", "hangs-on-more"),
        ("illegal memory access\nit happens with any GPU but the first", "only-first-gpu-works"),
        ("it got stuck\nwhen I set num_workers to 0, it doesn't happen", "works-without-workers"),
        ("it climbs with every epoch, the RSS I mean", "memory-rises"),
        ("VRAM goes up steadily\nduring inference of the model", "memory-rises"),
        ("Hello\rrank 3 never enters\rthe all_reduce\rThanks for any help", "rank-not-there"),
        (r'{"body": "Hello\nrank 3 never enters\n  the all_reduce\nThanks for any help"}', "rank-not-there"),
        ("训练过程中，显存不断上升", "memory-rises"),
        ("память растёт постоянно при обучении", "memory-rises"),
        ("about 300 MB more RAM per epoch", "memory-per-step"),
        ("memory went from 4 GB to 31 GB while training", "memory-two-amounts"),
        ("the GPU waits for data most of the time", "waits-for-data"),
        ("GPU utilization is 3 %\nbatches are read from NFS, num_workers=4", "idle-while-loading"),
        ("GPU利用率一直很低\n数据读取用了 8 个进程", "idle-while-loading"),
        ("the run hangs at step 10\nwith num_workers=0 everything runs", "works-without-workers"),
        ("it freezes as soon as num_workers > 0", "hangs-with-workers"),
        ("the answers are gibberish on two GPUs, and right on one GPU: no problem there", "garbled-on-several"),
        ("双卡输出乱码，单卡正常", "garbled-on-several"),
        ("it gets stuck with 2 gpus\nwith a single gpu it works", "hangs-on-several"),
        ("rank 3 never enters the all_reduce", "rank-not-there"),
        ("rank 0 还在保存，没有进入 barrier", "rank-not-there"),
        ("the other ranks wait\nonly rank 0 calls the barrier", "others-wait"),
        ("after disabling the IOMMU the transfers work", "works-without-peer-access"),
        ("a tensor that is copied from gpu 0 to gpu 1 arrives as all zeros", "copy-arrives-wrong"),
        ("two nodes hang\nwith NCCL_IB_DISABLE=1 it works", "works-without-rdma"),
        ("it died with a bus error\n--shm-size=16g fixed it", "works-with-shared-memory"),
        ("it was killed\nafter loading half of the checkpoint shards", "killed-while-loading"),
        ("the kernel kills my process\nthe input has 20 GB", "killed-with-data"),
        ("my process gets killed\nit needs more RAM than I have", "killed"),
        ("it prints 'killed' when loading\nthe machine has 16 GB", "killed-with-data"),
        ("Illegal instruction (core dumped)\nthe processor does not support AVX", "cpu-lacks-instructions"),
        ("I/O error\nthe process dies: there is not enough RAM", "host-memory-short"),
        ("the program closes while it loads\na larger page file solved it", "larger-page-file"),
        ("加载模型时崩溃\n增大虚拟内存就好了", "larger-page-file"),
        ("24G的显存还是不够，报错了", "gpu-too-small"),
        ("2GB of VRAM is not enough for this model, I cannot run it", "gpu-too-small"),
        ("rank 0 calls the barrier while the other ranks don't", "rank-not-there"),
        ("the other ranks are stuck in the broadcast", "others-in-collective"),
        ("with DDP the training hangs if the ranks have an uneven number of batches", "uneven-hangs"),
        ("60% of the step is spent in data loading", "loading-takes-most"),
        ("刚开始3G显存，500步之后11G", "memory-two-amounts"),
        ("两张3090卡死\n单张3090训练没问题", "hangs-on-several"),
        ("rank1跳过了最后一个batch，rank0就一直在all_reduce里等", "rank-not-there"),
        ("张量拷到第二块显卡之后内容就不对了", "copy-arrives-wrong"),
        ("the longer it trains, the more RAM it needs", "memory-rises"),
        ("训练时内存越占越多", "memory-rises"),
        ("训练中内存只增不减", "memory-rises"),
        ("训练进程的内存每个epoch翻一倍", "memory-rises"),
        ("the process's memory doubles every epoch of training", "memory-rises"),
        ("host memory went from 10% to 95% within three epochs", "memory-two-amounts"),
        ("slurm killed my job\nit used more memory than I had requested", "killed"),
        ("jupyter内核加载后就挂了\n内存占用100%", "killed"),
        ("加载权重时内存不够，程序自动退出", "host-memory-short"),
        ("the kernel terminates python\nthe machine runs out of RAM", "host-memory-short"),
        ("用一张卡正常\n用两张显卡时胡说八道", "garbled-on-several"),
        ("exclamation marks only on 2 cards\na single card is OK", "garbled-on-several"),
        ("tp=2的时候输出乱七八糟，tp=1正常", "garbled-on-several"),
        ("两张卡之间传数据，数据会错乱", "copy-arrives-wrong"),
        ('after x.to("cuda:1") all values are 0', "copy-arrives-wrong"),
        ("turning off the IOMMU made the hang disappear", "works-without-peer-access"),
        ("两台机器卡在初始化\n指定NCCL_SOCKET_IFNAME之后就好了", "works-with-interface"),
        ("two nodes do not get past the start\nthe firewall was the reason", "firewall-blocks"),
        ("双机训练卡住，防火墙关掉就行", "firewall-blocks"),
        ("每张卡的batch数不一样，最后一直等", "uneven-hangs"),
        ("workers设成8就卡住，0就没事", "works-without-workers"),
        ("我的显卡只有6G，模型装不下", "gpu-too-small"),
        ("12G的卡放不下这个模型", "gpu-too-small"),
        ("I can't fit the model on my 12 GB card", "gpu-too-small"),
        ("16GB VRAM isn't sufficient here, it crashes", "gpu-too-small"),
        ("docker里dataloader进程挂了，加大shm-size就好了", "works-with-shared-memory"),
        ("显卡闲着\n图片解码在cpu上", "idle-while-loading"),
        ("时间基本都花在读数据上", "waits-for-data"),
        ("一直在用cpu跑，torch版本是2.1.0+cpu", "torch-of-cpu"),
        ("half precision gives green images", "black-in-half"),
        ("I have two GPUs\nthe P2P copies arrive corrupted", "peer-access-garbles"),
        ("it hangs\nwith one GPU instead of two it works", "hangs-until-one"),
        ("it gets stuck with 2 gpus\nwith one GPU there isn't any problem", "hangs-on-several"),
        ("it hangs on 4 GPUs\nthis does not happen on a single graphics card", "hangs-on-several"),
        ("it froze with DDP\nwith NCCL_P2P_DISABLE=1 it no longer hangs", "works-without-peer-access"),
        ("building the extension failed\nnvcc could not be found", "nvcc-not-found"),
        ("the extension does not build: error\nmy nvcc was an outdated version", "nvcc-of-other-version"),
        ("the shared memory of the container is insufficient", "shared-memory-short"),
        ("torch 2.1.0+cpu\ntorch.cuda.is_available() is False", "torch-of-cpu"),
        ("training is slow\nthe loader takes 40 seconds to load each batch", "takes-to-load"),
        ("training was slow\nwith more workers it is much faster", "faster-with-workers"),
        ("it hangs unless I set num_workers=0", "hangs-except-without-workers"),
        ("it segfaults in the custom op\nrecompiling the extension solved it", "works-recompiled"),
        ("it runs out of memory: OOM\na smaller batch size solved it", "works-with-smaller-batch"),
        ("2 gpus work fine, with 4 it hangs", "hangs-on-more"),
        ("the process is always killed", "killed-always"),
        ("8 gpus: one process died\nthe other processes wait", "others-wait-for-lost"),
        ("it stops while loading\nset the page file to 60 GB", "larger-page-file"),
        ("die Auslastung ist gut, aber der Speicherverbrauch steigt bei jedem Schritt", "memory-rises"),
        ("VRAM climbs after each generation and is never freed", "memory-rises"),
        ("after 300 requests the server needs more GPU memory, and it is not released", "memory-rises"),
        ("every 100 iterations takes 500 MB more GPU memory", "memory-per-step"),
        ("每过100来个step，显存就会多占用4G", "memory-per-step"),
        ("GPU memory is full after an epoch\nthe loss was stored with its graph, loss.item() solved it", "keeps-graph"),
        ("显存溢出\naux_loss会累积计算图", "keeps-graph"),
        ("the design of the dataset causes a memory leak in the DataLoader", "leak"),
        ("the run freezes in the dataloader\na damaged image in the dataset was the reason", "corrupt-data-stalls"),
        ("数据集里有损坏的图片，dataloader读到它就卡住", "corrupt-data-stalls"),
        ("the pictures are all black\nswitching to full precision solved it", "black-until-float32"),
        ("生成的图全黑，改成fp32就正常", "black-until-float32"),
        ("this build of xformers has no kernels for sm_89", "arch-not-in-build"),
        ("pytorch版本不支持sm_90算力", "arch-not-in-build"),
        ("V100 cannot use flash-attn", "flash-on-old-gpu"),
        ("T4不支持flash attention", "flash-on-old-gpu"),
        ("compiling the extension failed\nit was caused by the wrong CUDA version", "other-cuda"),
        ("编译扩展失败，cuda版本和pytorch的cuda版本不一致", "other-cuda"),
        ("OOM at the first validation step\ntraining fits on the GPU", "out-of-memory-in-run"),
        ("in the docker container torch.cuda.is_available() returns False", "gpu-unseen-in-container"),
        ("the other workers get stuck because rank 0 is busy", "others-wait-for-busy"),
        ("all_gather under is_global_zero makes the program hang", "collective-in-one-rank"),
        ("CUDA out of memory\na zombie process still occupies the GPU memory", "others-hold-memory"),
        ("显卡OOM，原来显存被别人占用了", "others-hold-memory"),
        ("CUDA out of memory\nclosing the browser solved it", "memory-free-after-closing"),
        ("GPUを2枚使うと止まる。1枚なら問題ない", "hangs-on-several"),
        ("GPU 2개로 학습하면 멈춤, GPU 1개는 정상", "hangs-on-several"),
        ("it was killed\nIncreasing the RAM to 64 GB solved it", "more-host-memory-helps"),
        ("it exits without a message\nwith 32G instead of 16G everything works", "more-host-memory-helps"),
        ("building flash-attn ends in OOM", "out-of-memory-in-build"),
        ("the build of flash-attn was killed\nMAX_JOBS=2 fixed it", "fewer-jobs-help"),
        ("at the 17th frame the GPU is out of memory", "out-of-memory-after-some"),
        ("DDP: rank 1 finishes first, and rank 0 waits", "waits-for-ended"),
        ("the build fails\nthe system CUDA is 12.4 and torch was built for CUDA 11.8", "cuda-versions-differ"),
        ("nvcc complained\nCUDA 10 does not support gcc 9", "gcc-unfit"),
        ("I could not compile apex with CUDA 10\nDowngrading gcc to 7 solved it", "older-gcc-helps"),
        ("训练时图片的IO特别慢", "loads-slowly"),
        (
            "killed by the OOM killer\nwith more memory it runs longer until the same error occurs",
            "more-memory-only-delays",
        ),
        ("it does not use the GPU\ninstalling tensorflow-gpu solved it", "gpu-build-needed"),
        ("the checkpoint could not be saved since the disk is full", "disk-runs-full"),
        ("the second training fails because port 29500 is already taken", "port-is-taken"),
        ("torchrun: node 1 cannot reach the master node", "node-cannot-reach-master"),
        ("NCCL picked the docker0 interface", "wrong-interface"),
        ("it fails to import\nreinstalling mmcv fixed it", "works-reinstalled-extension"),
        ("the mask is on the CPU while the logits are on cuda:0, which raises an error", "operands-on-two-devices"),
        ("the loss scale keeps halving", "loss-scale-falls"),
        ("torch.compile fails since triton is not installed", "triton-not-installed"),
        ("onnxruntime runs on the CPU because only the CPU package is installed", "cpu-build-of-library"),
        ("it runs out of memory in training\nthe buffers: nothing is freed", "nothing-is-freed"),
        ("a GPU memory problem\nit works with a smaller batch size", "gpu-memory-enough-for-smaller-batch"),
        ("it fails to import\nflash_attn was built against torch 2.1, I now have 2.4", "built-for-other-torch"),
        ("fetching the next batch takes 12 seconds", "batch-loads-for-seconds"),
        ("the ranks time out\nonly rank 0 runs the evaluation", "work-of-one-rank"),
        ("every 4th iteration stalls\nthe DataLoader has 4 workers", "pauses-every-few-batches"),
        ("the first batch of each epoch takes long\nnum_workers=16", "epoch-begins-slowly"),
        ("with random tensors it is much faster than with the real data", "synthetic-data-is-fast"),
        ("the GPU was idle\ncaching the images in RAM: the epoch is now faster", "faster-with-storage-and-busy"),
        ("the GPU was never used\nonnxruntime-gpu was not installed", "gpu-package-not-there"),
        ("Illegal instruction\nbuilt from source it works", "source-build-runs"),
        ("Illegal instruction\nthe older version works", "older-release-runs"),
        ("no error, training freezes\nI have 2 GPUs, on a single GPU it works", "hangs-and-one-works"),
        ("8 gpus: one of the processes crashed, the others hang", "process-gone-rest-hangs"),
        ("DDP hangs\nthe ranks get different numbers of batches, so DDP waits", "uneven-on-ranks"),
        ("the driver was too old\nupdating the driver fixed it", "newer-driver-helps"),
        ("NCCL timed out\na longer timeout in init_process_group fixed it", "works-with-longer-timeout"),
        ("CUDA out of memory\nmax_split_size_mb:256 solved it", "works-with-allocator-setting"),
        ("the CUDA extension fails to build\nwith CC=gcc-9 it compiles", "older-gcc-builds"),
        ("the child hangs after fork because the mutex is held by another thread", "hangs-after-fork"),
        ("The start method is 'fork'. With OpenMP threads running this hangs", "hangs-after-fork"),
        ("使用fork方式时子进程会死锁,线程锁没有释放", "hangs-after-fork"),
        ("the loop freezes during dataloading", "hangs-while-loading-data"),
        ("训练卡在读取数据这一步", "hangs-while-loading-data"),
        ("torchrun on two nodes ends with 'connection timeout'", "connection-to-node-times-out"),
        ("两台机器 torchrun 报错 连接超时", "connection-to-node-times-out"),
        ("the process was killed when I try to evaluate", "process-killed"),
        ('it stopped with only the message "killed"', "process-killed"),
    ],
)
def test_a_statement_is_read_in_any_order_and_language(text: str, statement: str) -> None:
    assert statement in statements(text)


@pytest.mark.parametrize(
    ("text", "statement"),
    [
        ("several MPI ranks can run on the same GPU", "processes-on-one-gpu"),
        ("all processes use the same GPU model", "processes-on-one-gpu"),
        ("multi-gpu run fails\nset_device(local_rank) does not help", "works-with-gpu-by-rank"),
        ("cuInit failed: initialization error", "not-initialized-after-fork"),
        ("only rank 0 prints the progress bar, and there is a barrier", "rank-never-prints"),
        ("the GPUs get a different number of samples", "uneven-times-out"),
        ("the images are on NFS", "use-alternates-on-slow-storage"),
        ("num_workers: 0", "workers-zero-and-gpu-idle"),
        ("the GPU is hardly used\nworker_num: 8", "workers-zero-and-gpu-idle"),
        ("because the number of workers is 0, the order is the same in each run", "workers-zero-blamed"),
        ("the GPUs are idle between jobs\nthe data set is on a network drive", "idle-between-iterations"),
        ("the logs are on Lustre, which is slow", "slow-storage-reads"),
        ("an error appears if your GPU does not have enough memory", "gpu-lacks-memory"),
        ("training is slow on your CPU", "slow-on-cpu-until-variable"),
        ("I moved the images to the SSD, how long should an epoch take", "faster-on-other-storage"),
        ("with a batch of 4 GB or 20 GB there is no out of memory", "memory-amounts-until-full"),
        ("fixed a deadlock when using more than one GPU", "hangs-on-more"),
        ("the accuracy gets stuck at 96% with more than two GPUs", "hangs-on-more"),
        ("illegal memory access\nGPU 0 is the default, any device can be chosen", "only-first-gpu-works"),
        ("while training, the RAM does not grow", "memory-rises"),
        ("训练过程中显存没有增加", "memory-rises"),
        ("memory grows during training and then stabilizes", "memory-rises"),
        ("memory went from 20 GB to 21 GB while training", "memory-two-amounts"),
        ("memory grows with the batch size during training", "memory-rises"),
        ("GPU utilization is 98 %, num_workers=4", "idle-while-loading"),
        ("one GPU is at 0 %, the others are at 100 %\nnum_workers=4", "idle-while-loading"),
        ("the run hangs at step 10\nwith num_workers=0 it is not fixed", "works-without-workers"),
        ("the answers are gibberish on two GPUs", "garbled-on-several"),
        ("no garbage on two GPUs, and one GPU works", "garbled-on-several"),
        ("every rank must enter the barrier, please make sure that none is missed", "rank-not-there"),
        ("disabling the IOMMU did not help", "works-without-peer-access"),
        ("4090的显存比3080翻倍，训练时每个epoch更快", "memory-rises"),
        ("我把进程杀了，内存够用", "killed"),
        ("内存不够的话，把进程杀了就好了", "killed"),
        ("升级内核之后重启，内存换成32G", "killed"),
        ("two nodes hang\nopen the port in the firewall, please", "firewall-blocks"),
        ("the model fits on my 12 GB card", "gpu-too-small"),
        ("12G的卡可以放下7B模型", "gpu-too-small"),
        ("nvidia-smi shows 5% memory, num_workers=4", "idle-while-loading"),
        ("two nodes hang\nwith NCCL_IB_DISABLE=1 it starts to hang", "works-without-rdma"),
        ("two nodes hang\nNCCL_IB_DISABLE=1 did not help", "works-without-rdma"),
        ("docker run --shm-size=16g works as expected", "works-with-shared-memory"),
        ("the loss increases after each epoch and the memory is 10 GB", "memory-rises"),
        ("each epoch needs 10 GB of memory", "memory-per-step"),
        ("the worker is killed by signal: Segmentation fault\nduring training", "killed-with-data"),
        ("the process is killed, although the memory is enough", "killed"),
        ("the RAM grows with every epoch until the process gets killed", "killed"),
        ("Illegal instruction\nthe processor supports AVX", "cpu-lacks-instructions"),
        ("out of resources: shared memory, Required: 131072, Hardware limit: 101376", "shared-memory-short"),
        ("with NCCL_P2P_DISABLE=1 the output is garbage as well", "peer-access-garbles"),
        (
            "GPU utilization is 3 %\nmore num_workers did not help at all: workers make no difference",
            "idle-while-loading",
        ),
        ("a black image is the background of the demo", "black-in-half"),
        ("nvcc of another version is installed, and the training is slow", "nvcc-of-other-version"),
        ("how much VRAM is needed? 40 GB", "gpu-too-small"),
        ("I read that the memory grows with every step", "memory-rises"),
        ("Does the memory grow with every step?", "memory-rises"),
        ("on my colleague's machine the memory grows with every step", "memory-rises"),
        ("the GPU does not wait for data", "waits-for-data"),
        ("the images are black with fp32 too\nI use fp16", "black-in-half"),
        ("kernel died\nthe dataset has 20 GB, but memory is not the problem", "killed-with-data"),
        ("I increased the swap space to 64 GB and it crashes again", "larger-page-file"),
        ("the memory hardly grows with every step", "memory-rises"),
        ("it hangs\nwithout NCCL_IB_DISABLE=1 it works", "works-without-rdma"),
        ("use loss.item() for the logs", "keeps-graph"),
        ("there is no memory leak in the DataLoader", "leak"),
        ("the dataset has some broken images, I removed them", "corrupt-data-stalls"),
        ("the pictures are black with fp32 too", "black-until-float32"),
        ("please add support for sm_120 to the wheels", "arch-not-in-build"),
        ("flash attention works on the A100", "flash-on-old-gpu"),
        ("the wrong CUDA version is installed, and the training is slow", "other-cuda"),
        ("no OOM in the validation on my GPU", "out-of-memory-in-run"),
        ("torch.cuda.is_available() returns True in docker", "gpu-unseen-in-container"),
        ("rank 0 is busy", "others-wait-for-busy"),
        ("only rank 0 writes, then all_gather is called", "collective-in-one-rank"),
        ("another process is using the GPU, and everything is fine", "others-hold-memory"),
        ("CUDA out of memory\nclosing the browser did not help", "memory-free-after-closing"),
        ("it was killed\nIncreasing the RAM did not help", "more-host-memory-helps"),
        ("it exits\nIncreasing the GPU memory fraction works", "more-host-memory-helps"),
        ("OOM on the GPU memory after the build of the engine", "out-of-memory-in-build"),
        ("the build was killed\nMAX_JOBS=2 did not help", "fewer-jobs-help"),
        ("the first 20 frames are skipped; no GPU is out of memory", "out-of-memory-after-some"),
        ("DDP: rank 1 finishes first, all is well", "waits-for-ended"),
        (
            "the build fails at a missing header\nthe system CUDA is 12.4 and torch was built for CUDA 12.4",
            "cuda-versions-differ",
        ),
        ("CUDA 10 does not support gcc 9, so we use gcc 7 and it compiles", "gcc-unfit"),
        ("downgrading gcc to 9 fixes the warning\nbuilding with CUDA never fails", "older-gcc-helps"),
        ("图片的IO很快，训练正常", "loads-slowly"),
        ("with more memory it runs longer\nno error", "more-memory-only-delays"),
        ("tensorflow-gpu is installed and the GPU is used", "gpu-build-needed"),
        ("the disk is not full\nthe checkpoint could not be saved", "disk-runs-full"),
        ("training on port 29501, which is free", "port-is-taken"),
        ("torchrun: node 1 reaches the master node", "node-cannot-reach-master"),
        ("NCCL uses eth0, docker0 is excluded", "wrong-interface"),
        ("it fails to import\nreinstalling mmcv did not help", "works-reinstalled-extension"),
        ("the mask and the logits are on cuda:0, another error", "operands-on-two-devices"),
        ("the loss scale is 65536", "loss-scale-falls"),
        ("torch.compile with triton 3.0 works", "triton-not-installed"),
        ("the CPU package of the weather station\nonnxruntime uses the GPU", "cpu-build-of-library"),
        ("everything is freed at the end, no OOM", "nothing-is-freed"),
        ("a GPU memory problem\na smaller batch size did not help", "gpu-memory-enough-for-smaller-batch"),
        ("flash_attn was built against torch 2.4 and imports", "built-for-other-torch"),
        ("the batch takes 0.1 seconds to load", "batch-loads-for-seconds"),
        ("only rank 0 runs the evaluation, the other ranks go on", "work-of-one-rank"),
        ("every 4th iteration is logged\nthe DataLoader has 4 workers", "pauses-every-few-batches"),
        ("the first batch of each epoch is shuffled\nnum_workers=16", "epoch-begins-slowly"),
        ("the unit test uses random tensors and not the real data", "synthetic-data-is-fast"),
        ("the GPU was idle\ncaching the images in RAM did not make it faster", "faster-with-storage-and-busy"),
        ("onnxruntime-gpu was not installed on purpose", "gpu-package-not-there"),
        ("Illegal instruction\nbuilt from source it still crashes", "source-build-runs"),
        ("Illegal instruction\nthe older version did not help", "older-release-runs"),
        ("training freezes on 2 GPUs and on a single GPU", "hangs-and-one-works"),
        ("8 gpus: one of the processes crashed and was restarted", "process-gone-rest-hangs"),
        ("the ranks get different numbers of batches, which works", "uneven-on-ranks"),
        ("the driver was too old\nupdating the driver did not help", "newer-driver-helps"),
        ("NCCL timed out\na longer timeout did not help", "works-with-longer-timeout"),
        ("CUDA out of memory\nmax_split_size_mb:256 did not help", "works-with-allocator-setting"),
        ("the CUDA extension fails to build\nwith CC=gcc-9 it still fails", "older-gcc-builds"),
        ("it prints gibberish on two GPUs, on one GPU it is right\na bug is in our model", "garbled-on-several"),
        ("my fork of this project hangs with threads", "hangs-after-fork"),
        ("with spawn instead it does not deadlock", "hangs-after-fork"),
        ("it does not hang while loading the data", "hangs-while-loading-data"),
        ("stuck at loading dataset script from hub", "hangs-while-loading-data"),
        ("git clone on two nodes: connection timed out", "connection-to-node-times-out"),
        ("the process was killed when I want to stop it", "process-killed"),
    ],
)
def test_what_is_negated_or_otherwise_is_no_statement(text: str, statement: str) -> None:
    assert statement not in statements(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("64GB RAM is not enough, killed when loading", "gpu-memory"),
        ("2 GB of /dev/shm is too small", "gpu-memory"),
        ("200 GB disk is too small", "gpu-memory"),
        ("16 GB is not enough for the 70B model, so I use the 7B model, which fits", "gpu-memory"),
        ("I do not think that 24 GB is too small\nit crashes with a KeyError", "gpu-memory"),
        ("I do not think that 24 GB of VRAM is too small\nit fails to load: KeyError", "gpu-memory"),
        ("显存不是不够, 还有20G空闲", "gpu-memory"),
        ("显存不是不够, 还有20G空闲, 但是报错", "gpu-memory"),
        ("The README says the model requires a GPU with at least 24 GB. I have 80 GB", "gpu-memory"),
        ("low GPU memory usage, but KeyError", "gpu-memory"),
        ("with low GPU memory mode it fails with an error: KeyError", "gpu-memory"),
        ("OOM\nA smaller batch size did not solve it", "gpu-memory"),
        ("The docs say that a smaller batch size solves OOM\nKeyError: 'input_ids'", "gpu-memory"),
        ("nvcc is not outdated, it is 12.4 like torch\nthe build failed", "nvcc-mismatch"),
        ("building the extension failed\nnvcc is not outdated, it is 12.4 like torch", "nvcc-mismatch"),
        ("building the extension failed\nnvcc is not needed and cannot be found", "no-nvcc"),
        ("/dev/shm is 64 GB and never exceeds 10%", "shm-too-small"),
        ("The shared memory is not insufficient: 64G", "shm-too-small"),
        ("Do not install the CPU version of torch\nthe GPU is not used", "torch-without-cuda"),
        (
            "torch 2.1.0+cpu was installed before, I removed it and now have 2.1.0+cu121\nthe GPU is not used",
            "torch-without-cuda",
        ),
        (
            "it crashes in the extension\nRecompiling did not help, but without the extension it works",
            "extension-of-other-torch",
        ),
        ("I rebuilt mmcv, and it works right until step 100, then crashes", "extension-of-other-torch"),
        ("it crashes in mmcv\nI rebuilt the docker image and now it works", "extension-of-other-torch"),
        ("ComfyUI crashes\nGo to the settings page and set VAE to None", "host-memory"),
        ("it crashes\nSee the documentation page for more information", "host-memory"),
        ("it fails\nmax page size, add", "host-memory"),
        ("it crashes\nswap space: 4 GiB, you can set swap_space to 0", "host-memory"),
        ("I increased the page file but it still crashes", "host-memory"),
        ("training was killed by our admin", "host-memory"),
        ("the process was killed by our admin", "host-memory"),
        ("the training was killed by our admin, the dataset has 20 GB", "host-memory"),
        ("my training was killed after 24 hours because it reached the time limit", "host-memory"),
        ("Windows killed the WiFi driver during training", "host-memory"),
        ("it was killed by mistake while loading the dataset", "host-memory"),
        ("The system RAM is not full, I checked with htop\nit crashed", "host-memory"),
        ("is RAM too small? It is not. It crashes", "host-memory"),
        ("It crashes\nIt needs more RAM according to ChatGPT", "host-memory"),
        ("the download process took longer than the timeout", "collective-timeout"),
        ("gunicorn: the worker process took longer than the timeout", "collective-timeout"),
        ("the Slurm process exceeded the time limit", "collective-timeout"),
        ("I have an imbalanced dataset, and one GPU hangs in torch.compile", "collective-timeout"),
        ("the ranks wait for the other ranks\nOne package is missing.", "collective-timeout"),
        ("the other workers wait for a lock\nOne package is missing.", "collective-timeout"),
        ("I trained with fp32, not fp16. The images are black", "half-attention-nan"),
        ("I use --no-half and full precision but the result is the same\nthe images are black", "half-attention-nan"),
        ("The input is a grey image\nI use fp16", "half-attention-nan"),
        ("training is slow\nwith more workers the throughput dropped by half", "dataloader-stalled"),
        ("training is slow\nwith num_workers=8 in the data loader the accuracy dropped", "dataloader-stalled"),
        ("Most of the time the dataloader is fine", "dataloader-stalled"),
        ("it hangs\nthe dataloader workers are sleeping", "dataloader-stalled"),
        ("with NVLink the chatbot prints gibberish", "peer-copy-wrong"),
        ("the extension does not build: error\nthe README says that my nvcc is outdated", "nvcc-mismatch"),
        ("ChatGPT says that the GPU waits for data", "dataloader-stalled"),
        ("I thought that the GPU waits for data", "dataloader-stalled"),
        ("building the extension failed\nnvcc was not found to be the problem", "no-nvcc"),
        ("nvcc not found is not the problem: it builds with gcc", "no-nvcc"),
        ("building the extension failed\nThe wrong CUDA toolkit was not the reason", "nvcc-mismatch"),
        ("the process is not always killed\nthe dataset has 20 GB", "host-memory"),
        ("it crashes\nincrease the page file", "host-memory"),
        ("it crashes while loading\nYou can increase the page file.", "host-memory"),
        ("it crashes\nI recommend setting a larger page file", "host-memory"),
        ("加载模型时崩溃\n增大虚拟内存", "host-memory"),
        ("加载模型时崩溃\n> - 增大虚拟内存", "host-memory"),
        ("加载模型时崩溃\n建议增大一下虚拟内存", "host-memory"),
        ("加载模型时崩溃，可以增大虚拟内存试试", "host-memory"),
        ("the GPU works; CUDA out of memory was not the cause: it was a KeyError", "gpu-memory"),
        ("The CUDA out of memory error turned out not to be the issue", "gpu-memory"),
        ("CUDA out of memory 不是原因", "gpu-memory"),
        ("CUDA illegal memory access has nothing to do with it. torch 2.3", "kernel-out-of-bounds"),
        ("/dev/shm is 64 GB\nThe bus error of the DataLoader worker can be ruled out.", "shm-too-small"),
        ("someone said: RuntimeError: CUDA error: no kernel image is available for execution", "no-kernel-image"),
        ("the docs say that undefined symbol: _ZN3c10 comes from another torch", "extension-of-other-torch"),
        ("My friend said that nvcc was not found", "no-nvcc"),
        ("CUDA out of memory never happens in our runs", "gpu-memory"),
        ("nvidia-smi is not found in the container, which is expected: it has no GPU", "no-gpu-here"),
        ("no kernel for sm_90 is needed for our V100: the torch build is smaller", "no-kernel-image"),
    ],
)
def test_what_is_denied_or_heard_or_about_something_else_names_no_cause(text: str, cause: str) -> None:
    assert cause not in causes(text)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("I get CUDA error: out of memory. I do not know the reason.", "gpu-memory"),
        ("CUDA error: an illegal memory access, and I am not sure what the problem is", "kernel-out-of-bounds"),
        ("an illegal memory access is not the only problem", "kernel-out-of-bounds"),
        ("Google Colab says: CUDA out of memory", "gpu-memory"),
        ("I read the docs. RuntimeError: CUDA error: out of memory", "gpu-memory"),
        ("it closes\ntry to make the page file bigger than 120000, this fixed it for me", "host-memory"),
        ("it crashed while loading\nI increased the page file, and that solved it", "host-memory"),
        ("it stops while loading\nset the page file to 60 GB", "host-memory"),
        ("加载模型时崩溃\n增大虚拟内存之后解决了", "host-memory"),
        ("加载模型时崩溃\n我已经增大虚拟内存", "host-memory"),
        ("加载模型时崩溃\n我最后增大虚拟内存, 崩溃消失了", "host-memory"),
        ("加载模型时崩溃，我把虚拟内存增大到 60GB 才行", "host-memory"),
        ("CUDA out of memory never occurs with a batch size of 2, but with 4", "gpu-memory"),
        ('When the evaluation starts, "CUDA out of memory" occurs.', "gpu-memory"),
    ],
)
def test_what_is_near_a_denial_or_advice_and_is_neither_names_its_cause(text: str, cause: str) -> None:
    assert causes(text) == [cause]


def test_a_statement_names_a_cause_with_little_confidence_and_not_next_to_a_message() -> None:
    (match,) = cause_ranking.explain(Log(b"the GPU waits for data most of the time\ntraining is slow")).matches
    assert (match.id, match.confidence, match.evidence[0]) == ("dataloader-stalled", cause_scoring.STATED, "stated")
    assert causes("the GPU waits for data most of the time\nRuntimeError: CUDA error: out of memory") == ["gpu-memory"]


def test_a_statement_raises_no_confidence_above_its_limit_and_a_message_does() -> None:
    assert cause_scoring.confidence(0.9, ["stated", "raised"]) == cause_scoring.STATED
    assert cause_scoring.confidence(0.9, ["line", "raised"]) > 0.9
    assert cause_scoring.confidence(0.3, ["stated"]) == 0.3


def test_a_statement_names_its_cause_and_shows_its_lines() -> None:
    matches = cause_ranking.explain(Log(b"torch 2.4\nthe GPU is idle\ndecoding images takes most of the time")).matches
    assert [(match.id, [line.number for line in match.lines]) for match in matches] == [("dataloader-stalled", [2, 3])]


def test_growth_that_ends_in_an_error_is_the_cause_of_the_error() -> None:
    full = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert causes(full) == ["gpu-memory"]
    assert causes(f"the VRAM keeps growing with every step\n{full}") == ["memory-grows"]


def test_a_long_log_without_prose_has_no_statements() -> None:
    lines = "".join(f"step {n} | loss 2.31 | gpu mem 45 GB | 700 ms\n" for n in range(5000))
    assert statements(lines) == set()


def test_an_unknown_concept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = log_signatures.statements()[0]
    strange = log_signatures.ProseStatement(
        statement="strange", sentence=("memmory",), source=row.source, status=row.status, as_of=row.as_of
    )
    real = fact_file_reader.rows
    monkeypatch.setattr(
        fact_file_reader,
        "rows",
        lambda name, kind, type_: (strange,) if kind == "statements" else real(name, kind, type_),
    )
    log_signatures.statements.cache_clear()
    try:
        with pytest.raises(FactsError, match="unknown concept 'memmory'") as error:
            log_signatures.statements()
        assert "memory" in (error.value.hint or "")
    finally:
        log_signatures.statements.cache_clear()


def test_no_concept_and_no_statement_is_unused() -> None:
    statements = log_signatures.statements()
    used = {
        name for row in statements for name in (*row.sentence, *row.sentence_without, *row.report, *row.report_without)
    }
    assert {row.concept for row in log_signatures.concepts()} == used
    named = {name for row in log_signatures.signatures().values() for name in row.stated_by}
    assert {row.statement for row in statements if not row.symptom} <= named


def test_an_amount_in_a_strange_form_is_no_error() -> None:
    assert statements("memory went from 1.2.3 GB to 4.5..6 GB while training") <= {"memory-two-amounts"}
