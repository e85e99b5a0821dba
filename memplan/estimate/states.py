"""What is alive between two steps: parameters and optimizer state, counted tensor by tensor.

Letters: `H` hidden, `L` layers, `A` query heads, `K` key/value heads, `D` head size, `F` feed-forward, `V` vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.spec.model import Component, ConnectorSpec, DecoderSpec, ModelSpec, VisionSpec
from memplan.spec.run import RunSpec

CUDA_BLOCK_BYTES = 512
"""Source: kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp, torch 2.13."""

STATE_COPIES = {"adamw": 2, "adamw-foreach": 2, "adamw-loop": 2, "sgd": 0}
"""State tensors of a parameter's own size and dtype: two moments, or nothing without momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Equal parameter tensors: the same name in each of `count` blocks."""

    name: str
    """Name inside its block or module."""
    component: Component
    """What it belongs to, as `ModelSpec.frozen` names it."""
    numel: int
    """Elements of one tensor."""
    count: int = 1
    """Tensors."""
    trainable: bool = True
    """Whether a gradient and optimizer state are kept."""

    @property
    def total(self) -> int:
        """Elements of all tensors."""
        return self.numel * self.count


def param_groups(model: ModelSpec) -> tuple[ParamGroup, ...]:
    """Every parameter of `model`, tied ones once.

    Formula: the shapes of the modules in `memplan/models`.
    Counts: weights and biases; a tied head not at all.
    Leaves out: buffers.
    Checked: tests/estimate/test_states.py, against the meta-device modules and the published counts.
    """
    groups = [*embedding_groups(model.decoder), *block_groups(model.decoder)]
    if not model.decoder.tied:
        groups.append(ParamGroup(name="head", component="head", numel=model.decoder.vocab * model.decoder.hidden))
    if model.vision is not None and model.connector is not None:
        groups += vision_groups(model.vision)
        groups += connector_groups(model.vision, model.connector, model.decoder.hidden)
    return tuple(freeze(group, model) for group in groups)


def freeze(group: ParamGroup, model: ModelSpec) -> ParamGroup:
    """`group` with its `trainable` as `model.frozen` says; the embedding's extra rows always train."""
    frozen = group.component in model.frozen and group.name != "extra"
    if group.name == "embedding" and model.decoder.tied and "head" in model.frozen:
        frozen = True
    return ParamGroup(
        name=group.name, component=group.component, numel=group.numel, count=group.count, trainable=not frozen
    )


def embedding_groups(spec: DecoderSpec) -> Iterator[ParamGroup]:
    """Base table V*H, extra rows, learned positions."""
    yield ParamGroup(name="embedding", component="embedding", numel=spec.vocab * spec.hidden)
    if spec.extra_vocab:
        yield ParamGroup(name="extra", component="embedding", numel=spec.extra_vocab * spec.hidden)
    if spec.positions == "learned":
        yield ParamGroup(name="positions", component="embedding", numel=spec.max_positions * spec.hidden)


def block_groups(spec: DecoderSpec) -> Iterator[ParamGroup]:
    """The L blocks and the final norm."""
    for name, numel in block_shapes(spec).items():
        yield ParamGroup(name=name, component="blocks", numel=numel, count=spec.num_layers)
    yield ParamGroup(name="norm", component="blocks", numel=spec.hidden)
    if spec.norm == "layer" and spec.norm_bias:
        yield ParamGroup(name="norm.bias", component="blocks", numel=spec.hidden)


def block_shapes(spec: DecoderSpec) -> dict[str, int]:
    """Elements of each tensor of one decoder block, by name, in forward order.

    Formula: q A*D*H, k and v K*D*H each, out H*A*D; SwiGLU 3*H*F, GELU 2*H*F; norms H; qk-norms D; biases one a row.
    """
    hidden, ffn = spec.hidden, spec.ffn
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, int] = {}

    def norm(name: str) -> None:
        shapes[name] = hidden
        if spec.norm == "layer" and spec.norm_bias:
            shapes[f"{name}.bias"] = hidden

    def linear(name: str, out: int, width: int, bias: bool) -> None:
        shapes[name] = out * width
        if bias:
            shapes[f"{name}.bias"] = out

    norm("attn_norm")
    if spec.projections == "fused":
        linear("qkv", q_width + 2 * kv_width, hidden, spec.qkv_bias)
    else:
        linear("q", q_width, hidden, spec.qkv_bias)
        linear("k", kv_width, hidden, spec.qkv_bias)
        linear("v", kv_width, hidden, spec.qkv_bias)
    if spec.qk_norm:
        shapes["q_norm"] = shapes["k_norm"] = spec.head_dim
    linear("out", hidden, q_width, spec.out_bias)
    norm("mlp_norm")
    if spec.mlp != "swiglu":
        linear("up", ffn, hidden, spec.mlp_bias)
    elif spec.projections == "fused":
        linear("gate_up", 2 * ffn, hidden, spec.mlp_bias)
    else:
        linear("gate", ffn, hidden, spec.mlp_bias)
        linear("up", ffn, hidden, spec.mlp_bias)
    linear("down", hidden, ffn, spec.mlp_bias)
    return shapes


def vision_groups(spec: VisionSpec) -> Iterator[ParamGroup]:
    """Patch linear and positions, then the tower's blocks: two LayerNorms, q, k, v, out and two GELU matrices, all
    with biases."""
    width, inner = spec.hidden, spec.num_heads * spec.head_dim
    outside = {"patch": spec.patch_dim * width, "patch.bias": width, "vision.positions": spec.num_patches * width}
    inside = {"attn_norm": width, "attn_norm.bias": width}
    for name in ("q", "k", "v"):
        inside |= {name: inner * width, f"{name}.bias": inner}
    inside |= {"out": width * inner, "out.bias": width, "mlp_norm": width, "mlp_norm.bias": width}
    inside |= {"up": spec.ffn * width, "up.bias": spec.ffn, "down": width * spec.ffn, "down.bias": width}
    for name, numel in outside.items():
        yield ParamGroup(name=name, component="vision", numel=numel)
    for name, numel in inside.items():
        yield ParamGroup(name=name, component="vision", numel=numel, count=spec.num_layers)


def connector_groups(vision: VisionSpec, spec: ConnectorSpec, text_hidden: int) -> Iterator[ParamGroup]:
    """Pooling attention from the concatenated layers (biases) and SwiGLU projector (none)."""
    width, inner = vision.hidden * len(vision.layers_read), spec.num_heads * spec.head_dim
    shapes: dict[str, int] = {}
    for name in ("q", "k", "v"):
        shapes |= {name: inner * width, f"{name}.bias": inner}
    shapes |= {"out": spec.hidden * inner, "out.bias": spec.hidden}
    shapes |= {"gate": spec.ffn * spec.hidden, "up": spec.ffn * spec.hidden, "down": text_hidden * spec.ffn}
    for name, numel in shapes.items():
        yield ParamGroup(name=name, component="connector", numel=numel)


def count_total(model: ModelSpec) -> int:
    """Parameters, tied ones once."""
    return sum(group.total for group in param_groups(model))


def count_trainable(model: ModelSpec) -> int:
    """Parameters that train."""
    return sum(group.total for group in param_groups(model) if group.trainable)


def count_embedding(model: ModelSpec) -> int:
    """Parameters of the token embedding, extra rows included, positions not."""
    return sum(group.total for group in embedding_groups(model.decoder) if group.name != "positions")


def rounded(num_bytes: int, rules: str) -> int:
    """`num_bytes` as the allocator counts them: up to 512 on CUDA, as they are on the CPU."""
    if rules == "cpu":
        return num_bytes
    return -(-num_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def param_bytes(run: RunSpec) -> int:
    """Bytes of all parameters: 2 an element in `bf16`, 4 otherwise."""
    size = param_width(run)
    return sum(group.count * rounded(group.numel * size, run.device.rules) for group in param_groups(run.model))


def trained_groups(run: RunSpec) -> tuple[ParamGroup, ...]:
    """The parameters that get a gradient in `run`: those that train, tower and connector only when there are images."""
    unseen = ("vision", "connector") if run.step.images == 0 else ()
    return tuple(group for group in param_groups(run.model) if group.trainable and group.component not in unseen)


def grad_bytes(run: RunSpec, names: tuple[str, ...] | None = None) -> int:
    """Bytes of the gradients of all trainable parameters, or of those in `names`, in their parameters' dtype.

    Counts: for extra embedding rows beside a frozen or tied base table, the whole table's gradient: theirs is a view of
    it and keeps it alive. Source: AccumulateGrad, torch/csrc/autograd/functions/accumulate_grad.h, torch 2.13.
    """
    total = 0
    for group in trained_groups(run):
        if names is not None and group.name not in names:
            continue
        numel = group.numel
        if group.name == "extra" and (run.model.decoder.tied or "embedding" in run.model.frozen):
            numel += run.model.decoder.vocab * run.model.decoder.hidden
        total += group.count * rounded(numel * param_width(run), run.device.rules)
    return total


def trainable_bytes(run: RunSpec) -> int:
    """Bytes of one copy of all trainable parameters, such as a moment of Adam."""
    size = param_width(run)
    return sum(group.count * rounded(group.numel * size, run.device.rules) for group in trained_groups(run))


def buffer_bytes(run: RunSpec) -> int:
    """Bytes of buffers: D/2 rotary frequencies in fp32."""
    spec = run.model.decoder
    return rounded(4 * (spec.head_dim // 2), run.device.rules) if spec.positions == "rope" else 0


def optimizer_bytes(run: RunSpec) -> int:
    """Bytes of optimizer state.

    Formula: 2 * parameter bytes for AdamW, 0 for SGD, plus one fp32 step counter a tensor.
    Counts: state of trainable parameters only, in their dtype.
    Leaves out: step counters of the foreach and for-loop forms on CUDA, which live on the host.
    Source: torch/optim/adamw.py, torch 2.13. Checked: tests/estimate/test_states.py.
    """
    if run.step.optimizer == "sgd":
        return 0
    counters = sum(group.count for group in trained_groups(run))
    on_device = run.device.rules == "cpu" or run.step.optimizer == "adamw"
    return STATE_COPIES[run.step.optimizer] * trainable_bytes(run) + on_device * counters * rounded(4, run.device.rules)


def optimizer_temps_bytes(run: RunSpec) -> int:
    """Bytes that the optimizer's step makes and drops at its largest moment.

    Formula: fused 0; foreach one copy of all trainable parameters (the denominators); for-loop two of the largest
    tensor (its root and the root's quotient); SGD 0.
    Source: torch/optim/adam.py `_multi_tensor_adam`, `_single_tensor_adam`, torch 2.13.
    Checked: tests/estimate/test_measured.py.
    """
    if run.step.optimizer == "adamw-foreach":
        return trainable_bytes(run)
    if run.step.optimizer == "adamw-loop":
        largest = max((group.numel for group in trained_groups(run)), default=0)
        return 2 * rounded(largest * param_width(run), run.device.rules)
    return 0


def param_width(run: RunSpec) -> int:
    """Bytes of one parameter element."""
    return 2 if run.step.precision == "bf16" else 4
