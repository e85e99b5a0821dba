"""Facts of a row's environment that change what its numbers mean."""

from typing import Any

MEMORY_KEYS = ("device", "gpu", "mig", "torch", "cuda", "cudnn")
"""Facts that decide what an allocator is asked for, beside the settings; where they differ, rows are not compared."""
MEMORY_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Environment variables that change what an allocator hands out or keeps."""
SPEED_SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MALLOC_ARENA_MAX",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that change how long a step takes."""
PLACE_SETTINGS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Environment variables that say which GPU of a machine, and nothing of what it does."""
SPILLING = ("WDDM", "WSL")
"""Driver models under which what does not fit on the GPU goes to the host's memory, and no request fails."""


def spill_possible(environment: dict[str, Any]) -> bool:
    """Whether memory may silently spill to the host: a rung that is slow then says little about the GPU."""
    return environment.get("driver_model") in SPILLING
