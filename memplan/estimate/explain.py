"""The formula of each line of an estimate: what is alive at the peak, as sizes in letters."""

import copy
import dataclasses
import math
from typing import Any

from memplan.dtypes import ELEMENT_BYTES
from memplan.estimate.batch import Sizes
from memplan.estimate.blocks import place
from memplan.estimate.families import config_of
from memplan.estimate.reading import alive_at, largest, settle
from memplan.estimate.step import write_step
from memplan.estimate.symbols import Letters, text
from memplan.record.formula import FormulaLine
from memplan.spec.run import RunSpec

DECODER_LETTERS = {
    "hidden": "H", "num_heads": "A", "num_kv_heads": "K", "head_dim": "D", "ffn": "F", "vocab": "V", "experts": "E",
    "expert_ffn": "Fe",
}  # fmt: skip
CONFIG_LETTERS = {
    "hidden_size": "H", "num_attention_heads": "A", "num_key_value_heads": "K", "head_dim": "D",
    "intermediate_size": "F", "vocab_size": "V", "n_embd": "H", "n_head": "A", "n_inner": "F",
    "num_experts": "E", "num_local_experts": "E", "n_routed_experts": "E", "moe_intermediate_size": "Fe",
    "q_lora_rank": "Rq", "kv_lora_rank": "Rk", "qk_nope_head_dim": "Dn", "qk_rope_head_dim": "Dr", "v_head_dim": "Dv",
}  # fmt: skip
"""Letter of each number of a model, as in `spec.model`; `Fe` is the width of one expert, `Rq` and `Rk` are the ranks of
latent queries and keys, `Dn`, `Dr` and `Dv` the parts of a head without and with positions and of its values."""


UNSPLIT = "blocks that the allocator does not split"
"""What they hold beyond what was asked for."""


class Config(str):
    """A configuration's JSON, beside which its numbers stand as letters."""

    facts: dict[str, Any]


def explain(run: RunSpec) -> tuple[tuple[FormulaLine, ...], dict[str, int]]:
    """The lines of the peak of `run`, the largest first, and the value of each letter."""
    lettered, letters = with_letters(run)
    micro, seq = Letters.of(run.step.micro_batch, "B"), Letters.of(run.step.seq, "S")
    sizes = Sizes(batch=micro * run.step.chunks, micro_batch=micro, seq=seq)
    tape = write_step(lettered, sizes)
    asked = [int(alloc.num_bytes) for alloc in tape.allocs]
    place(tape)
    settle(tape, run.model.decoder.vocab)
    event, _ = max(largest(tape).values(), key=lambda found: found[1])
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    unsplit_bytes = 0
    for index in alive_at(tape, event):
        alloc = tape.allocs[index]
        if not asked[index]:
            continue
        unsplit_bytes += int(alloc.num_bytes) - asked[index]
        formula = f"{ELEMENT_BYTES[alloc.dtype]} * {text(math.prod(alloc.shape))}"
        group = groups.setdefault((alloc.category, alloc.part, alloc.op, formula), [0, 0])
        group[0] += alloc.copies
        group[1] += asked[index]
    lines = [
        FormulaLine(category=category, part=part, op=op, count=count, formula=formula, num_bytes=num_bytes)
        for (category, part, op, formula), (count, num_bytes) in groups.items()
    ]
    if unsplit_bytes:
        lines.append(FormulaLine(category="other", part="", op=UNSPLIT, count=1, formula="", num_bytes=unsplit_bytes))
    lines.sort(key=lambda line: (-line.num_bytes, line.part, line.op))
    return tuple(lines), letters | {"B": run.step.micro_batch, "S": run.step.seq}


def with_letters(run: RunSpec) -> tuple[RunSpec, dict[str, int]]:
    """`run` with a model whose numbers are letters, and their values."""
    values: dict[str, int] = {}

    def letter(name: str, value: int) -> int:
        values[name] = value
        return Letters.of(value, name)

    model = run.model
    if model.impl == "hf":
        facts = copy.deepcopy(config_of(run))
        for part in (facts, facts.get("text_config", {})):
            for key, name in CONFIG_LETTERS.items():
                if isinstance(part.get(key), int) and part[key] > 1:
                    part[key] = letter(name, part[key])
        config = Config(model.config)
        config.facts = facts
        return dataclasses.replace(run, model=dataclasses.replace(model, config=config)), values
    changes: dict[str, Any] = {
        key: letter(name, getattr(model.decoder, key))
        for key, name in DECODER_LETTERS.items()
        if getattr(model.decoder, key) > 1
    }
    decoder = dataclasses.replace(model.decoder, **changes)
    return dataclasses.replace(run, model=dataclasses.replace(model, decoder=decoder)), values
