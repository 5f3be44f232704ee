# Made by `envbuild render h200` from the lock sha256:c50f80d588d1fd765d08b7add8e281ab7cc45d97968cc1941138bd2483978edb; not to be edited.
# Its build context is made by `envbuild build`: bin/ (uv and the installer), debs/, base.tar; and a context wheels-<layer>
# for each folder of wheels, so that one comes while the wheels of another are installed.
# No step has network; every file is checked against the lock's sha256; every time is 1704067200.
FROM scratch AS common
ADD base.tar /

# the virtual environment, /opt/venv
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "venv", \
     "1704067200", \
     "3.11"]

# python
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-python,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "cuda-bindings==13.5.0 --hash=sha256:08b7e8d674c3266facb00453a7e34ea7d3ea965c2f594bb728f269f45f39fbe2", \
     "cuda-pathfinder==1.9.0 --hash=sha256:622df7440f7702f36b7a02a1699aa0b084fe04034d9939188fee9b16d0c36366", \
     "cuda-toolkit==13.0.2 --hash=sha256:b198824cf2f54003f50d64ada3a0f184b42ca0846c1c94192fa269ecd97a66eb", \
     "filelock==4.2.11 --hash=sha256:020e229e4bb9d410fc799c07ddf45fa217cba970278f40b30751d94f309b69e2", \
     "fsspec==2026.9.0 --hash=sha256:8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f", \
     "jinja2==3.1.6 --hash=sha256:85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67", \
     "markupsafe==3.0.4 --hash=sha256:6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808", \
     "mpmath==1.3.0 --hash=sha256:a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c", \
     "networkx==3.6.1 --hash=sha256:d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762", \
     "nvidia-cuda-cupti==13.0.85 --hash=sha256:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8", \
     "nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548", \
     "nvidia-cufile==1.15.1.6 --hash=sha256:08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44", \
     "nvidia-nvtx==13.0.85 --hash=sha256:4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4", \
     "pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13", \
     "setuptools==81.0.0 --hash=sha256:fdd925d5c5d9f62e4b74b30d6dd7828ce236fd6ed998a08d81de62ce5a6310d6", \
     "sympy==1.14.0 --hash=sha256:e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5", \
     "typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8"]

# nvidia-nvjitlink
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-nvjitlink,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-nvjitlink==13.0.88 --hash=sha256:13a74f429e23b921c1109976abefacc69835f2f433ebd323d3946e11d804e47b"]

# nvidia-curand
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-curand,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-curand==10.4.0.35 --hash=sha256:1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc"]

# nvidia-nvshmem-cu13
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-nvshmem-cu13,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-nvshmem-cu13==3.4.5 --hash=sha256:290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80"]

# nvidia-cuda-nvrtc
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-cuda-nvrtc,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575"]

# nvidia-cusparse
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-cusparse,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-cusparse==12.6.3.3 --hash=sha256:2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b"]

# nvidia-cusparselt-cu13
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-cusparselt-cu13,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-cusparselt-cu13==0.8.0 --hash=sha256:25e30a8a7323935d4ad0340b95a0b69926eee755767e8e0b1cf8dd85b197d3fd"]

# triton
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-triton,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "triton==3.6.0 --hash=sha256:e8e323d608e3a9bfcc2d9efcc90ceefb764a82b99dea12a86d643c72539ad5d3"]

# nvidia-nccl-cu13
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-nccl-cu13,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-nccl-cu13==2.28.9 --hash=sha256:e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42"]

# nvidia-cusolver
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-cusolver,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-cusolver==12.0.4.66 --hash=sha256:0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112"]

# nvidia-cufft
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-cufft,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-cufft==12.0.0.61 --hash=sha256:6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3"]

# nvidia-cudnn-cu13
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-cudnn-cu13,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-cudnn-cu13==9.19.0.56 --hash=sha256:d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf"]

# nvidia-cublas
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-nvidia-cublas,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "nvidia-cublas==13.1.0.3 --hash=sha256:ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171"]

# torch
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-torch,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "torch==2.11.0 --hash=sha256:7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a"]

# What extensions are compiled with; nothing of it is in the image, which has extensions/<name>/ of the context alone:
# the wheel that the stage wheel-<name> gave, checked, and kept under all that it was made from.
FROM common AS builder

# builder
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-builder,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "ninja==1.13.2 --hash=sha256:65a24341b5ac09fcadcc37082660be40a94174e51a937fabf6e2cae26225fa2c", \
     "nvidia-cuda-cccl==13.0.85 --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649", \
     "nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4", \
     "nvidia-cuda-nvcc==13.0.88 --hash=sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03", \
     "nvidia-cuda-profiler-api==13.0.85 --hash=sha256:73d2671deac833db6686d6fbde4753fa3a3a497d87540fc246f081f375243f66", \
     "nvidia-nvvm==13.0.88 --hash=sha256:c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0", \
     "packaging==26.3 --hash=sha256:d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c", \
     "wheel==0.48.0 --hash=sha256:3217dcc807155e45db462d7ef2431f5ddda0d7273b700d05a67b271ceb1287ab"]

# nvcc, of torch's CUDA
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "nvcc", \
     "1704067200", \
     "/opt/venv/lib/python3.11/site-packages/nvidia/cu13", \
     "13.0"]

FROM builder AS compiled-apex
ARG MAX_JOBS

# apex from git 6424da3b4faa6c8f062da4a48c424fff3f02d42d
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,source=sources/apex,target=/mnt/source \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "compile", \
     "1704067200", \
     "/usr/bin/env", \
     "APEX_CPP_EXT=1", \
     "APEX_CUDA_EXT=1", \
     "CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13", \
     "HOME=/build", \
     "NVCC_APPEND_FLAGS=--objdir-as-tempdir", \
     "PATH=/opt/venv/bin:/opt/venv/lib/python3.11/site-packages/nvidia/cu13/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", \
     "PYTHONHASHSEED=0", \
     "SOURCE_DATE_EPOCH=1704067200", \
     "TORCH_CUDA_ARCH_LIST=9.0", \
     "/opt/venv/bin/python", \
     "-m", \
     "pip", \
     "wheel", \
     "--verbose", \
     "--disable-pip-version-check", \
     "--no-build-isolation", \
     "--no-deps", \
     "--no-index", \
     "--no-cache-dir", \
     "--wheel-dir", \
     "/out", \
     "."]

FROM scratch AS wheel-apex
COPY --from=compiled-apex /out /

FROM common

# apex, compiled from 6424da3b4faa
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,source=extensions/apex,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "extension", \
     "1704067200", \
     "apex", \
     "6424da3b4faa6c8f062da4a48c424fff3f02d42d", \
     "9.0"]

# packages
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-packages,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "numpy==2.4.6 --hash=sha256:89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93", \
     "packaging==26.3 --hash=sha256:d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c"]

ENV HOME="/tmp"
ENV LANG="C.UTF-8"
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
ENV NVIDIA_VISIBLE_DEVICES="all"
ENV PATH="/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV PYTHONDONTWRITEBYTECODE="1"
ENV TORCHINDUCTOR_CACHE_DIR="/tmp/torchinductor"
ENV TORCH_CUDA_ARCH_LIST="9.0"
ENV TORCH_CUDNN_SDPA_DEPRIORITIZED="1"
ENV TRITON_CACHE_DIR="/tmp/triton"
ENV USER="envbuild"
ENV VIRTUAL_ENV="/opt/venv"
LABEL io.envbuild.lock="sha256:c50f80d588d1fd765d08b7add8e281ab7cc45d97968cc1941138bd2483978edb"
CMD ["python"]
