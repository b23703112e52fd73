"""Operators on cached keys and values, one folder each, in four: attention, selection, storage, layers.

* ``reference.py`` is the definition in plain torch, with the public signature and docstring.
* ``triton.py`` has the kernels and launches them, from arguments of the same names.
* ``config.py`` chooses launch parameters for given shapes, as a frozen dataclass that benchmarks and tests replace
  (``config=replace(config(...), tile=32)``).

The folder's function picks an implementation by device (:func:`._dispatch.operator`).

A kernel takes a tensor as one argument, pointer and strides together (:mod:`._operands`). ``None`` in its place is
resolved at compile time. Kernel names begin with the operator's name, so that profiles show it. Two helpers are shared:
:mod:`._paged` finds tokens by block table and device pages, :mod:`._overlap` launches.
"""
