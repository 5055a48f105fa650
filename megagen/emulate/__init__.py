"""The CUDA text of a kernel, compiled for the CPU and run by an engine that watches every access and wait.

``build`` compiles text and engine to one shared library, ``engine`` drives it, ``report`` turns what it found into
errors that name the schedule's lines. Needs a C++20 compiler, and neither a GPU nor torch.
"""

from megagen.emulate.build import compile_library
from megagen.emulate.engine import Engine, Kind
from megagen.emulate.report import Report

__all__ = ["Engine", "Kind", "Report", "compile_library"]
