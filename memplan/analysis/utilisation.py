"""What a GPU does at most: dense FLOPs a second by its name, for MFU and HFU. Stdlib only.

Data sheets print the figure with structured sparsity first, which no training step reaches; here stand the dense ones:
half of a figure marked "with sparsity". Products accumulate in fp32. An unknown name gives None, never a neighbour's
figure: a card's laptop, PCIe, power-limited and partitioned (MIG) variants have peaks of their own.
"""

from dataclasses import dataclass

_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_ADA = "NVIDIA Ada GPU Architecture (white paper, v2.1), appendix A"
_BLACKWELL = "NVIDIA Blackwell data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture (white paper, v2.1), appendix A"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture (white paper, v1.04), table 2"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture (white paper), appendix A"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The dense peaks of one kind of card, in 10**12 FLOPs a second."""

    names: tuple[str, ...]
    """What NVML and torch call it, without a leading `NVIDIA ` or `Tesla `."""
    half: float
    """Tensor cores on fp16 and, where they know it, bf16."""
    tf32: float | None
    """Tensor cores on fp32 that torch may round to TF32; None where they do not know it."""
    fp32: float
    """Without tensor cores, as torch multiplies fp32 unless it is told otherwise."""
    source: str
    """The document that prints the figures."""
    bf16: bool = True
    """Whether the tensor cores know bf16."""


PEAKS = (
    Peak(names=("GB300", "GB200"), half=2500, tf32=1250, fp32=80, source=f"{_BLACKWELL}, GB200 (half of the sparse)"),
    Peak(names=("B200",), half=2250, tf32=1100, fp32=75, source=f"{_BLACKWELL}, HGX B200 (half of the sparse)"),
    Peak(names=("H200",), half=989.5, tf32=494.5, fp32=67, source="NVIDIA H200 data sheet, SXM (half of the sparse)"),
    Peak(names=("H200 NVL",), half=835.5, tf32=417.5, fp32=60, source="NVIDIA H200 data sheet, NVL (likewise)"),
    Peak(names=("H100 80GB HBM3",), half=989.4, tf32=494.7, fp32=66.9, source=f"{_HOPPER}, H100 SXM5"),
    Peak(names=("H100 PCIe",), half=756, tf32=378, fp32=51.2, source=f"{_HOPPER}, H100 PCIe"),
    Peak(
        names=("H100 NVL",), half=835.5, tf32=417.5, fp32=60, source="NVIDIA H100 data sheet, NVL (half of the sparse)"
    ),
    Peak(
        names=("GH200 480GB", "GH200 120GB", "GH200 144G HBM3e"),
        half=989.5,
        tf32=494.5,
        fp32=67,
        source="NVIDIA GH200 Grace Hopper Superchip data sheet (half of the sparse)",
    ),
    Peak(names=("H800",), half=989.5, tf32=494.5, fp32=67, source="NVIDIA H800 data sheet, SXM (half of the sparse)"),
    Peak(names=("H800 PCIe",), half=756.5, tf32=378, fp32=51, source="NVIDIA H800 data sheet, PCIe (likewise)"),
    Peak(names=("H20",), half=148, tf32=74, fp32=44, source="NVIDIA H20 data sheet"),
    Peak(
        names=(
            *("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe", "A100-SXM-80GB"),
            *("A800-SXM4-40GB", "A800-SXM4-80GB", "A800 80GB PCIe"),
        ),
        half=312,
        tf32=156,
        fp32=19.5,
        source=_A100,
    ),
    Peak(names=("A30",), half=165, tf32=82, fp32=10.3, source="NVIDIA A30 data sheet"),
    Peak(names=("A40",), half=149.7, tf32=74.8, fp32=37.4, source="NVIDIA A40 data sheet"),
    Peak(names=("A10",), half=125, tf32=62.5, fp32=31.2, source="NVIDIA A10 data sheet"),
    Peak(names=("RTX A6000",), half=154.8, tf32=77.4, fp32=38.7, source=f"{_GA102}, RTX A6000"),
    Peak(names=("GeForce RTX 3090 Ti",), half=80, tf32=40, fp32=40, source=f"{_GA102}, RTX 3090 Ti"),
    Peak(names=("GeForce RTX 3090",), half=71, tf32=35.6, fp32=35.6, source=f"{_GA102}, RTX 3090"),
    Peak(names=("L40S",), half=362.05, tf32=183, fp32=91.6, source="NVIDIA L40S data sheet (733 is the sparse)"),
    Peak(names=("L40",), half=181.05, tf32=90.5, fp32=90.5, source="NVIDIA L40 data sheet (362.1 is the sparse)"),
    Peak(names=("L4",), half=121, tf32=60, fp32=30.3, source="NVIDIA L4 data sheet (half of the sparse)"),
    Peak(
        names=("RTX 6000 Ada Generation",),
        half=364.2,
        tf32=182.1,
        fp32=91.1,
        source="NVIDIA Ada GPU Architecture for professionals (white paper), RTX 6000",
    ),
    Peak(names=("GeForce RTX 4090",), half=165.2, tf32=82.6, fp32=82.6, source=f"{_ADA}, RTX 4090"),
    Peak(names=("GeForce RTX 4080",), half=97.5, tf32=48.7, fp32=48.7, source=f"{_ADA}, RTX 4080"),
    Peak(names=("GeForce RTX 5090",), half=209.5, tf32=104.8, fp32=104.8, source=f"{_RTX_BLACKWELL}, RTX 5090"),
    Peak(names=("GeForce RTX 5080",), half=112.6, tf32=56.3, fp32=56.3, source=f"{_RTX_BLACKWELL}, RTX 5080"),
    Peak(
        names=("RTX PRO 6000 Blackwell Workstation Edition",),
        half=503.8,
        tf32=251.9,
        fp32=126,
        source="NVIDIA RTX Blackwell PRO GPU Architecture (white paper), RTX PRO 6000",
    ),
    Peak(
        names=("RTX PRO 6000 Blackwell Server Edition",),
        half=468,
        tf32=234,
        fp32=120,
        source="NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet: TF32 234, of which bf16 is twice",
    ),
    Peak(names=("T4",), half=65, tf32=None, fp32=8.1, bf16=False, source="NVIDIA T4 data sheet"),
    Peak(
        names=("V100-SXM2-16GB", "V100-SXM2-32GB"), half=125, tf32=None, fp32=15.7, bf16=False, source=f"{_V100}, SXM2"
    ),
    Peak(names=("V100-PCIE-16GB", "V100-PCIE-32GB"), half=112, tf32=None, fp32=14, bf16=False, source=f"{_V100}, PCIe"),
    Peak(names=("V100S-PCIE-32GB",), half=130, tf32=None, fp32=16.4, bf16=False, source=f"{_V100}, V100S"),
)
"""Every card whose figures are known."""

_BY_NAME = {name.lower(): peak for peak in PEAKS for name in peak.names}


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """FLOPs a second, dense, that the GPU which NVML or torch call `gpu_name` does at most in `precision` (`bf16`,
    `fp16-mixed`, `fp32`, `tf32`, ...: what stands before a dash counts); None for an unknown card, and for a precision
    that its tensor cores do not know."""
    peak = find_peak(gpu_name)
    if peak is None:
        return None
    computed = precision.lower().partition("-")[0]
    known = {"bf16": peak.half if peak.bf16 else None, "fp16": peak.half, "tf32": peak.tf32, "fp32": peak.fp32}
    tera = known.get(computed)
    return None if tera is None else tera * 10**12


def find_peak(gpu_name: str) -> Peak | None:
    """The figures of the GPU called `gpu_name`, or None."""
    words = " ".join(gpu_name.split()).lower()
    return _BY_NAME.get(words.removeprefix("nvidia ").removeprefix("tesla "))
