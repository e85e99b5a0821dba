"""memplan: what fits on the card, by estimate and by real steps."""

__version__ = "0.1.0"
