"""A GPU that is not there, for the self-test's CUDA paths: no CUDA build of torch and no driver is needed.

`python -m pretend GPU MODULE JOB FILE` runs the harness over a module's PROBES on one of gpus.GPUS. Python sees tensors
on `cuda:0`; to torch's C++ they are the host's, so that autograd and every operation work.

What is as on a GPU: a tensor of the host and one of the GPU do not mix; only explicit copies cross; products of half
types are added up in float32 and rounded once, TF32 where the flags and the GPU allow it; attention backends refuse
what they refuse at this compute capability; memory is counted and ends; the driver's libraries are stand-ins.

What is not: torch's and NVIDIA's kernels themselves, their speed, their workspaces, streams, and CUDA's own autocast
lists. A pass here shows that a probe's path for GPUs is right, and that its tolerances leave room for this arithmetic.
"""
