"""What checkpointing does with each op of a block: one forward and one backward of it on fake tensors, by each mode."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from memplan.errors import MemplanError
from memplan.models.blocks import find_blocks
from memplan.record.explain import FREE, RECOMPUTE, SAVE, BlockPolicy, OpPolicy
from memplan.spec.run import RunSpec
from memplan.step.builder import TrainStep, build_step, no_mark
from memplan.step.precision import autocast
from memplan.step.region import Region
from memplan.step.selective import ATTENTION, Policy, is_product, op_name, selective_contexts, shares_memory
from memplan.trace.tracing import Tracing

SHARED = "blocks share keys and values, so that a step checkpoints norms and feed-forward layers in full instead"

Call = tuple[tuple[Any, ...], dict[str, Any]]


def explain(run: RunSpec) -> BlockPolicy:
    """What the mode of `run` does with each op of its first block, under the rules of its device."""
    mode = run.step.checkpointing
    ops = mode.ops if mode.kind == "selective" else ()
    with Tracing(run.device, frames=False, guess_phases=False):
        step = build_step(plain(run), torch.device("cpu"))
        path, block = next(iter(find_blocks(step.model, run.step.blocks).items()))
        call = first_call(step, block)
        with autocast(run.step, torch.device("cpu")):
            log = logged(block, call, ops)
            kept, done = kept_without(block, call), {}
            for name, contexts in (("selective", selective_contexts(ops)), ("full", None)):
                again = Region(path, block.forward, preserve_rng=run.step.dropout > 0, contexts=contexts)
                done[name] = backward_flops(again, call)
            without = backward_flops(block.forward, call)
    hidden = call[0][0].nbytes
    return BlockPolicy(
        run=run,
        block=path,
        ops=log.rows(mode.kind),
        kept_bytes={"none": kept, "selective": hidden + log.kept_bytes, "full": hidden},
        recomputed_flops={"none": 0} | {name: flops - without for name, flops in done.items()},
        note=SHARED if step.model.shares_kv and mode.kind == "selective" else "",
    )


def plain(run: RunSpec) -> RunSpec:
    """`run` with no lever on its blocks, of which it has one where they are all equal, and the plainest optimizer."""
    decoder = run.model.decoder
    if run.model.impl == "memplan" and not decoder.kv_shared:
        decoder = dataclasses.replace(decoder, num_layers=1)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, decoder=decoder),
        step=dataclasses.replace(
            run.step, ckpt="none", compile="off", batch=run.step.micro_batch, chunks=1, optimizer="sgd"
        ),
    )


class Reached(Exception):
    """The forward of a model has come to its first block."""


def first_call(step: TrainStep, block: nn.Module) -> Call:
    """Arguments of the first call of `block`, the hidden states first, which are made to want a gradient."""
    calls: list[Call] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise Reached

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    with torch.no_grad(), suppress(Reached):
        step.chunk_loss(step.batch, no_mark)
    handle.remove()
    if not calls or not calls[0][0] or not isinstance(calls[0][0][0], Tensor):
        raise MemplanError(
            f"{type(block).__name__} takes no hidden states as its first argument.", "Name other blocks: --blocks."
        )
    args, kwargs = calls[0]
    return (args[0].detach().requires_grad_(), *args[1:]), kwargs


def logged(block: nn.Module, call: Call, ops: tuple[str, ...]) -> "Log":
    """The ops of one forward of `block`."""
    log = Log(Policy(ops))
    with log:
        block.forward(*call[0], **call[1])
    return log


def kept_without(block: nn.Module, call: Call) -> int:
    """Bytes that `block` keeps for backward without checkpointing, each storage once; parameters and what all blocks
    share (rotation tables, masks) left out."""
    shared = [*tensors((call[0][1:], call[1])), *block.parameters()]
    known = {tensor.untyped_storage()._cdata for tensor in shared}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block.forward(*call[0], **call[1])
    del out
    return int(sum(storage.nbytes() for storage in storages.values()))


def backward_flops(function: Callable[..., Any], call: Call) -> int:
    """Floating-point operations of the backward of `function`, those that it runs again included."""
    outs = [out for out in tensors(function(*call[0], **call[1])) if out.requires_grad]
    tally = Tally()
    with tally:
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return tally.num_flops


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in `tree`."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Counts floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.num_flops += flops_of(func, args, kwargs or {}, out)
        return out


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Asks a policy about every op, and notes what it says."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.ops: dict[tuple[str, str], list[OpPolicy]] = {}
        """Calls by name and policy, each as a row of its own."""
        self.kept: dict[int, Any] = {}
        """Storages of what is kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = tensors(out)
        if func.namespace == "prim":  # questions about a tensor
            return out
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        own = [] if shares_memory(func) else [r for r in results if r.untyped_storage()._cdata not in given]
        role = self.policy.role(func, args, kwargs)
        kept = self.policy(SimpleNamespace(is_recompute=False), func, *args, **kwargs) == CheckpointPolicy.MUST_SAVE
        if (not own and not func._schema.is_mutable) or not any(result.is_floating_point() for result in results):
            role = FREE
        if kept:
            self.kept |= {result.untyped_storage()._cdata: result.untyped_storage() for result in own}
        num_bytes, num_flops = sum(result.nbytes for result in own), flops_of(func, args, kwargs, out)
        row = OpPolicy(
            op=str(func),
            policy=role,
            kind=kind_of(func),
            num_calls=1,
            num_bytes=num_bytes,
            num_flops=num_flops,
            num_kept=int(kept),
            kept_bytes=num_bytes * kept,
            kept_flops=num_flops * kept,
        )
        self.ops.setdefault((row.op, role), []).append(row)
        return out

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept, each storage once."""
        return int(sum(storage.nbytes() for storage in self.kept.values()))

    def rows(self, mode: str) -> tuple[OpPolicy, ...]:
        """Each op once as the checkpoint mode called `mode` treats it, the one of most operations and bytes first."""
        rows = [together(calls, mode) for calls in self.ops.values()]
        return tuple(sorted(rows, key=lambda row: (-row.num_flops, row.policy == FREE, -row.num_bytes, row.op)))


def together(calls: list[OpPolicy], mode: str) -> OpPolicy:
    """All calls of an op as one row; modes other than `selective` keep all of them or none."""
    first = calls[0]
    counts = ("num_calls", "num_bytes", "num_flops", "num_kept", "kept_bytes", "kept_flops")
    total = {name: sum(getattr(call, name) for call in calls) for name in counts}
    if mode == "selective" or first.policy == FREE:
        return dataclasses.replace(first, **total)
    keeps = mode in ("none", "offload")
    for name, kept in (("num_calls", "num_kept"), ("num_bytes", "kept_bytes"), ("num_flops", "kept_flops")):
        total[kept] = total[name] * keeps
    return dataclasses.replace(first, policy=SAVE if keeps else RECOMPUTE, **total)


def kind_of(op: Any) -> str:
    """`product`, `grouped`, `attention` or nothing."""
    if is_product(op):
        return "grouped" if "grouped" in op_name(op) else "product"
    return "attention" if ATTENTION.fullmatch(op_name(op)) else ""


def flops_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one call as torch counts them; attention's forward by its two products, and its
    backward, which every mode has once, not at all."""
    name = op_name(op)
    if ATTENTION.fullmatch(name):
        (*heads, num_queries, width), num_keys, value_width = args[0].shape, args[1].size(-2), args[2].size(-1)
        return int(2 * math.prod(heads) * num_queries * num_keys * (width + value_width))
    formula = flop_registry.get(getattr(op, "overloadpacket", op))
    if formula is None or "attention" in name:
        return 0
    return int(formula(*args, **kwargs, out_val=out))
