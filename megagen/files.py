"""Files written in one step: others see the old one or the whole new one; failures and interrupts leave no half."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from megagen.errors import MegagenError


def write(path: Path, content: bytes | str | Callable[[IO[bytes]], object], *, folders: bool = False) -> None:
    """Put ``content``, or what it writes when called, in the place of ``path``; ``folders``: make those above it.

    Text is UTF-8. Raises MegagenError when that cannot be.
    """
    aside: Path | None = None
    try:
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        aside = Path(name)
        with os.fdopen(handle, "wb") as out:
            if callable(content):
                content(out)
            else:
                out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        aside.chmod(0o644)
        aside.replace(path)
    except BaseException as e:
        if aside is not None:
            aside.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise MegagenError(f"cannot write {path}: {e.strerror or e}") from e
        raise
