"""Importing this module checks the installed stack: the first import of every module that imports torch or torchrec.

A mixed triple then says what is wrong and which line repairs it, instead of `undefined symbol`. It is an import and not
a call, so that it can stand above `import torch` (ruff's isort keeps the section `guard` there); it costs 10 ms, once
per process.
"""

from __future__ import annotations

from torchrec_ext import stack

stack.require()
