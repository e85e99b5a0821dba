"""cuBLAS workspaces by card, torch version and environment."""

import pytest

from memplan.trace.cuda_rules.generation import generation
from memplan.trace.cuda_rules.workspaces import cublas_workspace_bytes, cublaslt_workspace_bytes
from memplan.units import KIB, MIB


@pytest.mark.parametrize(
    ("card", "version", "num_bytes"),
    [
        ("a100-80g", (2, 13), 8_519_680),
        ("rtx-4090", (2, 13), 8_519_680),
        ("h100-80g", (2, 13), 32 * MIB),
        ("h100-80g", (2, 5), 32 * MIB),
        ("b200", (2, 13), 32 * MIB),
        ("b200", (2, 9), 8_519_680),
        ("rtx-5090", (2, 13), 32 * MIB),
    ],
)
def test_cublas(card, version, num_bytes):
    assert cublas_workspace_bytes(generation(card), torch_version=version, environ={}) == num_bytes


def test_two_workspaces_are_what_swiglu_was_short_of():
    """The published peak of SwiGLU on an A100 stood 16.25 MiB above the trace of its tensors, at every length."""
    assert 2 * cublas_workspace_bytes(generation("a100-80g"), environ={}) == 16.25 * MIB


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [(":4096:8", 32 * MIB), (":16:8", 128 * KIB), (":4096:2:16:8", 8_519_680), ("what", 8_519_680)],
)
def test_the_environment_overrules(config, num_bytes):
    environ = {"CUBLAS_WORKSPACE_CONFIG": config}
    assert cublas_workspace_bytes(generation("a100-80g"), environ=environ) == num_bytes


def test_cublaslt_shares_the_workspace_unless_separated():
    assert cublaslt_workspace_bytes(environ={}) == 0
    assert cublaslt_workspace_bytes(environ={"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}) == MIB
    assert cublaslt_workspace_bytes(torch_version=(2, 9), environ={}) == MIB
    assert cublaslt_workspace_bytes(torch_version=(2, 9), environ={"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}) == 0
    assert cublaslt_workspace_bytes(torch_version=(2, 6), environ={"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}) == MIB
    asked = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0", "CUBLASLT_WORKSPACE_SIZE": "4096"}
    assert cublaslt_workspace_bytes(environ=asked) == 4 * MIB
