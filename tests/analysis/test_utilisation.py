"""Peaks of cards: dense, by exact name, and what MFU and HFU make of them."""

import pytest

from memplan.analysis.utilisation import PEAKS, find_peak, peak_flops
from memplan.record import RungResult

TENSOR_CLOCKS = {
    # multiprocessors, FLOPs of one a clock (dense, fp16 or bf16 with fp32 sums), boost clock in MHz
    "NVIDIA B200": (148, 8192, 1850),
    "NVIDIA H200": (132, 4096, 1830),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1830),
    "NVIDIA H100 PCIe": (114, 4096, 1620),
    "NVIDIA A100-SXM4-40GB": (108, 2048, 1410),
    "NVIDIA A30": (56, 2048, 1440),
    "NVIDIA A40": (84, 1024, 1740),
    "NVIDIA A10": (72, 1024, 1695),
    "NVIDIA RTX A6000": (84, 1024, 1800),
    "NVIDIA GeForce RTX 3090": (82, 512, 1695),
    "NVIDIA L40S": (142, 1024, 2520),
    "NVIDIA L40": (142, 512, 2490),
    "NVIDIA L4": (58, 1024, 2040),
    "NVIDIA GeForce RTX 4090": (128, 512, 2520),
    "NVIDIA GeForce RTX 4080": (76, 512, 2505),
    "NVIDIA RTX 6000 Ada Generation": (142, 1024, 2505),
    "NVIDIA GeForce RTX 5090": (170, 512, 2407),
    "NVIDIA GeForce RTX 5080": (84, 512, 2617),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (188, 1024, 2617),
    "Tesla T4": (40, 1024, 1590),
    "Tesla V100-SXM2-32GB": (80, 1024, 1530),
    "Tesla V100-PCIE-16GB": (80, 1024, 1380),
}
"""From the architecture papers: what the silicon does, which no sparsity doubles."""


@pytest.mark.parametrize("name", TENSOR_CLOCKS)
def test_f50_figures_are_what_the_silicon_does_without_sparsity(name: str) -> None:
    multiprocessors, flops_a_clock, mhz = TENSOR_CLOCKS[name]
    assert peak_flops(name, "fp16") == pytest.approx(multiprocessors * flops_a_clock * mhz * 10**6, rel=0.02)


def test_f50_an_h100_is_held_against_its_dense_figure() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == peak_flops("NVIDIA H100 80GB HBM3", "bf16-mixed")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",  # a special build with more multiprocessors
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_f50_a_card_that_only_looks_like_a_known_one_has_no_figure(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_f50_variants_of_one_chip_are_told_apart() -> None:
    figures = {
        name: peak_flops(f"NVIDIA {name}", "bf16")
        for name in ("H100 80GB HBM3", "H100 PCIe", "H100 NVL", "L40", "L40S")
    }
    assert None not in figures.values()
    assert len(set(figures.values())) == len(figures)


def test_f50_a_precision_that_the_tensor_cores_do_not_know_has_no_figure() -> None:
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("Tesla T4", "tf32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "int4") is None


def test_fp32_is_not_tf32_unless_it_is_called_so() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12


def test_names_are_found_as_nvml_and_torch_and_old_drivers_spell_them() -> None:
    assert find_peak("A100-SXM4-40GB") is find_peak("NVIDIA A100-SXM4-40GB") is not None
    assert find_peak("nvidia  h200") is find_peak("NVIDIA H200")


def test_every_card_names_its_document_and_no_name_stands_twice() -> None:
    assert all(peak.source for peak in PEAKS)
    names = [name.lower() for peak in PEAKS for name in peak.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.names[0])
def test_f50_tf32_is_half_of_bf16_so_neither_is_a_sparse_one(peak) -> None:  # type: ignore[no-untyped-def]
    assert peak.fp32 <= (peak.tf32 or peak.half) <= peak.half
    if peak.tf32 is not None:
        assert peak.half / peak.tf32 == pytest.approx(2, rel=0.03)


def row(**values: object) -> RungResult:
    start = {"rung": "B1c1@full", "run_id": "a", "status": "ok", "source": "measured", "model": "tiny", "step": {}}
    return RungResult(**start | {"step_ns": (10**9,)} | values)  # type: ignore[arg-type]


def test_f50_what_is_recomputed_counts_for_hfu_alone() -> None:
    found = row(model_flops=3 * 10**14, hardware_flops=4 * 10**14, peak_flops=peak_flops("NVIDIA H200", "bf16"))
    assert found.mfu_frac == pytest.approx(300 / 989.5)
    assert found.hfu_frac == pytest.approx(400 / 989.5)
    assert found.hfu_frac >= found.mfu_frac  # type: ignore[operator]


def test_f50_there_is_no_mfu_on_an_unknown_card() -> None:
    found = row(model_flops=10**14, hardware_flops=10**14, peak_flops=peak_flops("NVIDIA Unheard Of", "bf16"))
    assert found.mfu_frac is None
    assert found.hfu_frac is None
