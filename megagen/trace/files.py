"""Files in one step: whoever fails or is interrupted leaves no half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from megagen.errors import MegagenError


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write a file and put it in the place of ``path``. Raises MegagenError when that cannot be."""
    aside: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        aside = Path(name)
        with os.fdopen(handle, "wb") as out:
            fill(out)
        aside.chmod(0o644)
        aside.replace(path)
    except BaseException as e:
        if aside is not None:
            aside.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise MegagenError(f"cannot write {path}: {e.strerror or e}") from e
        raise
