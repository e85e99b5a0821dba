"""Where a model comes from: built-in facts as data (no torch), and the lean reference modules built from them (torch).

`registry` reads the facts; `factory` builds the module that they describe; `batch` makes what it is fed with.
"""
