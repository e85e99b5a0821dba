"""Where a rung runs: a process of its own. The parent's half never imports torch."""
