"""The tower, the connector, Molmo2's joint and the synthetic batch."""

import dataclasses
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memplan.errors import MemplanError
from memplan.models.batch import IGNORED, Batch, placeholder, pooling, synthetic_batch
from memplan.models.connector import Connector
from memplan.models.factory import build_model, component_parameters
from memplan.models.molmo2 import Molmo2
from memplan.models.registry import model_spec, names
from memplan.models.vision import VisionTower
from memplan.spec import DeviceSpec, ModelSpec, RunSpec, StepSpec

TINY = model_spec("tiny-molmo2")


def run_of(spec: ModelSpec, **step: int) -> RunSpec:
    step = {"batch": 2, "seq": spec.seq, "images": spec.images} | step
    workload = "vlm" if step["images"] else "lm"
    return RunSpec(model=spec, step=StepSpec(**step, workload=workload), device=DeviceSpec(name="cpu", rules="cpu"))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def random(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def saved_bytes(work: Callable[..., Tensor], *args: Tensor) -> int:
    """Bytes that autograd keeps while `work(*args)` runs, a tensor counted at each saving."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work(*args)
    return sum(sizes)


def test_exact_counts_of_molmo2() -> None:
    for size, projector in (("4b", 47_316_992), ("8b", 78_643_200)):
        spec = model_spec(f"molmo2-{size}")
        with torch.device("meta"):
            tower = VisionTower(spec.vision)
            connector = Connector(spec.vision, spec.connector, spec.decoder.hidden)
        assert count(tower) == 382_505_936
        assert count(tower.blocks[0]) == 15_239_504
        assert count(connector.pooling) == 9_294_336
        assert count(connector.projector) == projector


def test_sdpa_and_eager_attention_agree() -> None:
    pixels = torch.randn(3, 25, 27)
    sdpa, eager = VisionTower(TINY.vision), VisionTower(TINY.vision, attention="eager")
    eager.load_state_dict(random(sdpa).state_dict())
    torch.testing.assert_close(sdpa(pixels), eager(pixels))
    one, other = (Connector(TINY.vision, TINY.connector, 128, attention=kind) for kind in ("sdpa", "eager"))
    other.load_state_dict(random(one).state_dict())
    features, index = torch.randn(2, 50, 128), pooling(TINY, 2).repeat(2, 1, 1)
    torch.testing.assert_close(one(features, index), other(features, index))


def test_layers_are_read_in_the_order_given() -> None:
    tower = random(VisionTower(TINY.vision))
    pixels = torch.randn(2, 25, 27)
    last, before = tower(pixels).chunk(2, dim=-1)
    torch.testing.assert_close(tower.blocks[2](before), last)
    assert not torch.equal(last, before)


def test_outputs_not_read_are_not_kept() -> None:
    outputs: list[weakref.ref[Tensor]] = []
    tower = VisionTower(TINY.vision)
    for block in tower.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    with torch.no_grad():
        tower.blocks[2].register_forward_hook(lambda *_: alive.extend(one() is not None for one in outputs))
        alive: list[bool] = []
        tower(torch.randn(1, 25, 27))
    assert alive == [False, True, True]


def test_padding_patches_do_not_reach_a_token() -> None:
    connector = random(Connector(TINY.vision, TINY.connector, 128))
    features = torch.randn(1, 25, 128)
    index = torch.tensor([[[3, -1, -1, -1], [3, 3, 3, 3], [3, 4, -1, -1]]])
    tokens = connector(features, index)
    torch.testing.assert_close(tokens[:, 0], tokens[:, 1])
    changed = features.clone()
    changed[:, 0] += 1.0  # the patch that -1, clamped, would read
    torch.testing.assert_close(connector(changed, index), tokens)
    changed[:, 4] += 1.0
    assert not torch.allclose(connector(changed, index)[:, 2], tokens[:, 2])


def test_pooling_reads_every_patch_once() -> None:
    index = pooling(TINY, 2)
    assert index.shape == (18, 4)
    assert sorted(index[index >= 0].tolist()) == list(range(50))
    assert index[0].tolist() == [0, 1, 5, 6]
    assert index[2].tolist() == [4, -1, 9, -1]
    assert index[9].tolist() == [25, 26, 30, 31]
    assert model_spec("molmo2-4b").image_tokens(4) == 784


def test_image_tokens_are_added_to_the_embeddings() -> None:
    model, batch = build_model(TINY), synthetic_batch(run_of(TINY), "cpu", 0)
    assert isinstance(model, Molmo2)
    assert batch.pixels is not None
    assert batch.pooled_idx is not None
    plain, joined = model.decoder.embed(batch.tokens), model.embed(batch)
    images = model.connector(model.features(batch.pixels), batch.pooled_idx)
    torch.testing.assert_close(joined[:, :18], plain[:, :18] + images)
    torch.testing.assert_close(joined[:, 18:], plain[:, 18:])


def test_mask_is_causal_but_for_image_tokens() -> None:
    model, batch = build_model(TINY), synthetic_batch(run_of(TINY, seq=24), "cpu", 0)
    assert isinstance(model, Molmo2)
    mask = model.mask(batch)
    assert mask is not None
    assert mask.shape == (2, 1, 24, 24)
    assert mask.dtype == torch.float32
    rows, columns = torch.arange(24)[:, None], torch.arange(24)
    seen = (columns <= rows) | ((rows < 18) & (columns < 18))
    assert torch.equal(mask[1, 0] == 0, seen)
    assert (mask[1, 0][~seen] == torch.finfo(torch.float32).min).all()


def test_without_images_it_is_its_decoder() -> None:
    model, batch = build_model(TINY), synthetic_batch(run_of(TINY, images=0), "cpu", 0)
    assert batch.pixels is None
    expected = model.decoder.trunk(model.decoder.embed(batch.tokens))
    torch.testing.assert_close(model(batch), expected)


def test_a_frozen_tower_keeps_nothing() -> None:
    pixels = torch.randn(2, 2, 25, 27)
    frozen = build_model(dataclasses.replace(TINY, frozen=("vision",)))
    training = build_model(TINY)
    assert isinstance(frozen, Molmo2)
    assert isinstance(training, Molmo2)
    assert saved_bytes(frozen.features, pixels) == 0
    assert saved_bytes(training.features, pixels) > 0
    assert saved_bytes(frozen.features, pixels.clone().requires_grad_()) > 0
    assert not frozen.features(pixels).requires_grad


def test_frozen_components() -> None:
    model = build_model(TINY)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["decoder.embedding.weight"]
    assert model.decoder.head_weight is model.decoder.embedding.weight
    everything = ("embedding", "blocks", "vision", "connector", "head")
    model = build_model(dataclasses.replace(TINY, frozen=everything))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["decoder.embedding.extra"]
    wide = build_model(dataclasses.replace(model_spec("tiny-wide"), frozen=("head",)))
    assert [name for name, p in wide.named_parameters() if not p.requires_grad] == ["decoder.head.weight"]
    assert sum(p.numel() for c in everything for p in component_parameters(wide, c)) == count(wide)


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("tiny")])
def test_built_in_any_dtype_and_on_meta(name: str) -> None:
    spec = model_spec(name)
    with torch.device("meta"):
        assert {p.device.type for p in build_model(spec).parameters()} == {"meta"}
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(spec)
        batch = synthetic_batch(run_of(spec), "cpu", 0)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model(batch).dtype == torch.bfloat16
        assert batch.pixels is None or batch.pixels.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("tiny")])
def test_every_trainable_parameter_gets_a_gradient(name: str) -> None:
    spec = model_spec(name)
    model, batch = build_model(spec), synthetic_batch(run_of(spec), "cpu", 0)
    logits = model.head.logits(model(batch))
    nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_batch_is_random_but_repeatable() -> None:
    run = run_of(TINY)
    one, same, other = (synthetic_batch(run, "cpu", seed) for seed in (0, 0, 1))
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(one.pixels, same.pixels)
    assert not torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.tokens[:, 19:], one.labels[:, 18:-1])
    assert (one.tokens[:, :18] == placeholder(TINY)).all()
    assert placeholder(model_spec("molmo2-4b")) == 151_938
    assert (one.labels == IGNORED).sum(1).tolist() == [17, 17]
    assert one.labels.max() < TINY.decoder.vocab


def test_chunks_are_views_that_add_up() -> None:
    batch = synthetic_batch(run_of(TINY, batch=6), "cpu", 0)
    parts = [batch.chunk(index, 3) for index in range(3)]
    for field in dataclasses.fields(Batch):
        whole = getattr(batch, field.name)
        if whole is None:
            continue
        pieces = [getattr(part, field.name) for part in parts]
        assert torch.equal(torch.cat(pieces), whole)
        assert pieces[1].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert synthetic_batch(run_of(model_spec("tiny")), "cpu", 0).chunk(1, 2).pixels is None


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(MemplanError, match="18 image tokens"):
        synthetic_batch(run_of(TINY, seq=18), "cpu", 0)
    with pytest.raises(MemplanError, match="no vision tower"):
        synthetic_batch(run_of(model_spec("tiny"), images=1), "cpu", 0)
