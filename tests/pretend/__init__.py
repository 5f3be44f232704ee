"""A simulated GPU for the self-test's CUDA paths. It needs no GPU, no driver and no CUDA build of torch.

`python -m pretend GPU MODULE JOB FILE` runs the harness over a module's PROBES on one of gpus.GPUS. Python sees tensors
on `cuda:0`; for torch's C++ code they are on the host, so that autograd and every operation work.

As on a GPU: operations refuse tensors of two devices, and only explicit copies move data between them; products of half
types are added up in float32 and rounded once; TF32 is used where the flags and the GPU allow it; attention backends
refuse what they refuse at this compute capability; memory is counted, and an allocation that does not fit fails; a CUDA
graph reads the current values of its tensors at each replay; libcuda and NVML (stand-ins written in C) and nvidia-smi
respond.

Not as on a GPU: torch's and NVIDIA's kernels, their speed and workspaces; streams; the lists of operations that
autocast converts; inference mode, which is replaced by no_grad; and the functions in runtime.ON_HOST, which run on the
host. A pass shows that a probe's path for GPUs works and that its tolerances leave room for this arithmetic, not that a
GPU passes.
"""
