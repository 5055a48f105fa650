"""CUDA text in, cubins and a report out: NVRTC or nvcc, a content-addressed cache, ptxas and SASS figures.

Needs neither a GPU nor a CUDA toolkit. ``build`` is the way through; ``nvrtc`` and ``nvcc`` are the compilers,
``cache`` keeps what they made, ``report`` reads figures out of it.
"""

from megagen.compile.artifact import Artifact, KernelReport
from megagen.compile.build import compile_source

__all__ = ["Artifact", "KernelReport", "compile_source"]
