"""LitGPT's LoRA under torch's own FSDP on the CPU, one of two ranks, against the same iteration over the ledger."""

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from memplan.backends.cpu import CpuBackend
from memplan.backends.loading import load
from memplan.estimate.script import peak_since
from memplan.estimate.setup import Setup
from memplan.estimate.tape import Tape

FOLDER = Path(__file__).parents[2] / "ladders" / "published"
SIZES = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 688, "vocab": 1024}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rotary": 64, "llama": True},
    "phi": {"rotary": 32, "one_norm": True, "head_bias": True, "gelu": "tanh"},
    "stablelm": {"rotary": 16},
}
CLOSE = 0.002
"""Views of what is split hold small tensors that the ledger does not."""


@pytest.fixture
def ranks() -> Iterator[None]:
    """A group of two ranks, of which the other never answers."""
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    gc.collect()  # no window is to see the end of what one before has made


def measured(shape: Any, batch: int, seq: int, litgpt: Any) -> int:
    """The peak of building it and of two iterations."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({litgpt.Block})
    with CpuBackend().window() as window:
        gpt = litgpt.Gpt(shape, seq, litgpt.Recipe("lora", "")).float()
        for name, parameter in gpt.named_parameters():
            parameter.requires_grad_("lora_" in name)
        model = FullyShardedDataParallel(
            gpt, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
        apply_activation_checkpointing(model, auto_wrap_policy=policy)
        tokens, labels = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
        for _ in range(2):
            with model.no_sync():
                logits = [part.float() for part in model(tokens)]
                logits[-1] = logits[-1][..., :-1, :]
                targets = labels[..., 1:].split(128, dim=1)
                pairs = zip(logits, targets, strict=True)
                losses = [F.cross_entropy(p.flatten(0, 1), t.flatten(), reduction="none") for p, t in pairs]
                loss = torch.cat(losses).mean()
                loss.backward()
    assert window.reading is not None
    return window.reading.peak.allocated_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 40), (2, 300)])
def test_a_rank_under_fsdp_is_estimated_as_it_is_measured(
    kind: str, batch: int, seq: int, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    shape = importlib.import_module("litgpt_shapes").Shape(**SIZES, **KINDS[kind])
    tape = Tape("cpu")
    tape.setup = Setup(dtype="float32", frozen=(), rank=0, adapted=(), lora_base="", computed="float32", dropout=0.0)
    step = load(FOLDER / "litgpt_fsdp_sizes.py", "rank_step")(tape, shape, batch=batch, seq=seq, world=2)
    step(), step()
    peak = measured(shape, batch, seq, importlib.import_module("litgpt"))
    assert abs(peak_since(tape, 0, above_start=False) / peak - 1) <= CLOSE
