"""A run in one line: its rung and every lever that was pulled."""

from memplan.spec import RunSpec


def step_line(run: RunSpec) -> str:
    """`B4c2@full, seq 512, loss full, bf16, adamw, sdpa attention, eager norm`, and what is out of the ordinary."""
    step = run.step
    levers = [f"B{step.batch}c{step.chunks}@{step.ckpt}", f"seq {step.seq}"]
    levers += [f"suffix {step.suffix}"] if step.suffix else []
    levers += [f"rows {step.rows}"] if step.rows != "full" else []
    levers += [f"{step.images} images"] if step.images else []
    levers += [step.workload] if step.workload not in ("lm", "vlm") else []
    levers += [f"loss {step.loss}", step.precision, step.optimizer, f"{step.attention} attention", f"{step.norm} norm"]
    levers += [f"clip {step.clip:g}"] if step.clip is not None else []
    levers += [f"{name} {getattr(step, name)}" for name in ("lora", "dropout", "blocks") if getattr(step, name)]
    levers += [f"{step.parallel} over {step.world}"] if step.world > 1 else []
    levers += ["compiled"] if step.compile == "on" else []
    levers += ["updated in backward"] if step.update == "backward" else []
    levers += [f"{'+'.join(run.model.frozen)} frozen"] if run.model.frozen else []
    return ", ".join(levers)
