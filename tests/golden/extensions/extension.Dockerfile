# Compiles the extensions of the lock sha256:db9ab6319ec031d623237d13f662a4fe6bd3e040d56d6026d2a35ec33aea9b33.
# `envbuild build` creates its build contexts: one with bin/ (uv and the installer), debs/ and base.tar, and a context
# wheels-<layer> for each layer of wheels, so that one is transferred while the wheels of another are installed.
# No step has network; every file is checked against the lock's sha256; every new modification time is 1704067200.
FROM scratch AS builder
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
     "pip==1.0 --hash=sha256:ba50a427a3fa9dbf0057575a44852c097d56b7a2170f784cd031aca2404b29ac"]

# torch
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-torch,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "torch==1.0 --hash=sha256:ea32f47f1996ab0061766f74f57f166c6c562f81063c1a007871ce45bf60547a"]

# builder
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,from=wheels-builder,target=/mnt/wheels \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "wheels", \
     "1704067200", \
     "cuda-toolkit==1.0 --hash=sha256:20ed5bfddbb0af4e6b4d346a5a57011fc3889036973b5d150003e2de19b67687", \
     "ninja==1.0 --hash=sha256:db9aee878af5d3721053e386e2e92fd10d2f65796d284553b6d54e3427836ebb", \
     "packaging==1.0 --hash=sha256:41e583d8167f160bec8f47299d5adc1212be516b20a9c891d3b2454703319b8b", \
     "setuptools==1.0 --hash=sha256:0a65f1d294132391eed038acb05cf7f18509d6fea028ba01f5cb82bba68324d6", \
     "wheel==1.0 --hash=sha256:5c0a2d19c6afce6bd8c9e054edc860aa283cc7c9bde15c96e7bd44cac598af73"]

# nvcc, of torch's CUDA
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "nvcc", \
     "1704067200", \
     "/opt/venv/lib/python3.11/site-packages/nvidia/cu13", \
     "13.0"]

FROM builder AS compiled-kernels
ARG MAX_JOBS

# kernels from git cccccccccccccccccccccccccccccccccccccccc
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,source=sources/kernels,target=/mnt/source \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "compile", \
     "1704067200", \
     "/usr/bin/env", \
     "CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13", \
     "HOME=/build", \
     "KERNELS_CUDA=1", \
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
     "--config-settings=--build-option=--fast", \
     "."]

FROM scratch AS wheel-kernels
COPY --from=compiled-kernels /out /

FROM builder AS compiled-other
ARG MAX_JOBS

# other from sdist eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee
RUN --network=none --mount=type=tmpfs,target=/mnt --mount=type=bind,source=bin,target=/mnt/bin --mount=type=bind,source=sources/other,target=/mnt/source \
    ["/bin/sh", \
     "/mnt/bin/install", \
     "compile", \
     "1704067200", \
     "/usr/bin/env", \
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

FROM scratch AS wheel-other
COPY --from=compiled-other /out /
