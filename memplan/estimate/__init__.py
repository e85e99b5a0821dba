"""Witness 1: sizes by closed formulas over a ledger of ops, without torch, in milliseconds.

Each module of a model is written once more over sizes alone (`reference`, `families`); of each op it is written down
what it makes, what it saves and what its backward makes (`views`, `ops`, `products`, `attention`), and `tape` and
`engine` know who keeps what for how long. Of equal blocks three are run and the others follow (`stack`). The same words
serve a script of anybody's (`script`).

Known limits
    Left out are what cuDNN's attention takes inside itself, the temporary storage of sorts and convolutions, and the
    CPU's packing buffers for bf16 products. A compiled step is not known (`uncovered` says so). What the allocator does
    not split and what it reserves is told by its model over the ledger's requests (`blocks`), where the blocks between
    the first and the last of a deep model stand behind one another; sweeps leave it out. Transformers'
    delta-nets are told on its own torch code; where flash-linear-attention is installed its kernels keep less. In a
    mixture of experts every token goes to as many rows as the router picks; no capacity drops any.
"""

from memplan.estimate.covers import uncovered
from memplan.estimate.peak import estimate

__all__ = ["estimate", "uncovered"]
