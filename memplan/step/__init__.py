"""The real training step, and the proof that each lever leaves its result alone."""
