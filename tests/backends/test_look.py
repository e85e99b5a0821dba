"""FLOPs of a step and its attention kernels, seen in one step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import run_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from memplan.backends.look import Look, grouped_flops
from memplan.step.builder import build_step


def look_at(work: Callable[[], Any]) -> Look:
    with Look() as seen:
        work()
    return seen


def test_products_of_forward_and_backward_are_counted() -> None:
    layer, rows = nn.Linear(16, 32, bias=False), torch.randn(8, 16)
    seen = look_at(lambda: layer(rows).sum().backward())
    assert seen.model_flops == seen.hardware_flops == 2 * 2 * 8 * 16 * 32, "forward, and the weight's gradient"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_counts_for_the_hardware_alone(reentrant: bool) -> None:
    layer, rows = nn.Linear(16, 32, bias=False), torch.randn(8, 16, requires_grad=True)
    block = nn.Sequential(layer, nn.Tanh())
    seen = look_at(lambda: checkpoint(block, rows, use_reentrant=reentrant).sum().backward())
    product = 2 * 8 * 16 * 32
    assert (seen.model_flops, seen.hardware_flops) == (3 * product, 4 * product)


def test_a_steps_model_flops_are_the_same_whatever_is_checkpointed() -> None:
    def seen(**step: Any) -> Look:
        built = build_step(run_of(seq=32, batch=2, **step), torch.device("cpu"))
        built()
        return look_at(built)

    plain = seen()
    for variant in (
        {"ckpt": "full"},
        {"ckpt": "selective"},
        {"attention": "eager"},
        {"chunks": 2, "loss": "chunked-ckpt:2"},
    ):
        other = seen(**variant)
        assert other.model_flops == plain.model_flops, variant
        assert other.hardware_flops > other.model_flops or variant == {"attention": "eager"}
    assert plain.attention == {"flash": 4}
    assert seen(ckpt="full").attention == {"flash": 8}, "recomputed calls are calls"
    assert seen(attention="eager").attention == {}


def test_f25_the_math_path_is_known_by_its_softmax() -> None:
    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        math = look_at(lambda: sdpa(query, query, query).sum().backward())
    fast = look_at(lambda: sdpa(query, query, query).sum().backward())
    assert (math.attention, fast.attention) == ({"math": 1}, {"flash": 1})
    assert math.model_flops == fast.model_flops == 6 * 2 * 1 * 2 * 8 * 8 * 16
    assert fast.hardware_flops - fast.model_flops == 2 * 1 * 2 * 8 * 8 * 16, "the scores, once more"
    assert math.hardware_flops == math.model_flops


def test_the_optimizers_products_are_the_hardwares() -> None:
    """Muon's are more than the model's own."""

    def seen(optimizer: str) -> Look:
        built = build_step(run_of(seq=16, batch=2, optimizer=optimizer), torch.device("cpu"))
        built()
        return look_at(built)

    plain, muon = seen("adamw"), seen("muon")
    assert muon.model_flops == plain.model_flops
    assert muon.hardware_flops > 2 * plain.hardware_flops


def test_a_kernel_without_a_formula_leaves_the_flops_open() -> None:
    seen = Look()
    seen._attend("_flash_attn_forward", (torch.empty(1, 8, 2, 16),) * 3)
    assert seen.attention == {"_flash_attn_forward": 1}
    assert not seen.complete


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [
        ((10, 4), (3, 4, 5), 2 * 10 * 4 * 5),
        ((6, 10), (10, 5), 2 * 6 * 10 * 5),
        ((3, 6, 4), (4, 10), 2 * 6 * 4 * 10),
        ((3, 6, 4), (3, 4, 5), 2 * 3 * 6 * 4 * 5),
    ],
)
def test_a_row_of_a_grouped_product_is_in_one_group(left: tuple[int, ...], right: tuple[int, ...], flops: int) -> None:
    assert grouped_flops(torch.empty(left), torch.empty(right)) == flops
