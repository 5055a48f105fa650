"""One rank of a decode on two GPUs, as torchrun starts it: what it emitted and saw, into a file.

``python rank_of_two.py CHECKPOINT PROMPT_TOKENS EMIT OUT``; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
are set. LATE_S: how much longer than it needs it takes to load.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(checkpoint: str, prompts: str, emit: str, out: str) -> None:
    from whole_decode import greedy, prompt

    from megagen.runtime import decoder
    from megagen.weights import packed

    load, late = packed.Packed.load, float(os.environ.get("LATE_S", "0"))

    def slowly(*given: Any) -> dict[str, torch.Tensor]:
        nonlocal late
        time.sleep(late)
        late = 0.0
        return load(*given)

    setattr(packed.Packed, "load", slowly)  # noqa: B010
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with decoder.open(Path(checkpoint), tp=ranks, live=ranks, rank=rank, positions=4096) as found:
        runs = [greedy(found, prompt(int(n), found.vocab), int(emit)) for n in prompts.split(",")]
        streams = [x[0].tensors["stream"].cpu() for x in (found.bound[0][-1:],)]
    torch.save({"runs": [(r.ids, r.prompt, r.logits) for r in runs], "streams": streams}, f"{out}.{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
