"""Operators on cached keys and values, one folder each.

``reference.py`` is the definition in plain torch, ``triton.py`` the kernel, and the folder's function picks
one by device.
"""
