"""What makes a trace on fake CPU tensors the trace of a CUDA step: the kernels, the casts, the memory inside ops.

`rules.cuda_rules` opens all of it. The choices themselves (`generation`, `sdpa`, `autocast_lists`, `hidden_ops`,
`workspaces`) are plain functions and data without torch.

Known limits: see `autocast`, `hidden` and `workspaces`. The rules are those of torch 2.13 with the cuDNN of its CUDA 13
wheels, for dense tensors on one NVIDIA card from Ampere on.
"""
