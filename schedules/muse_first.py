"""What begins a decoding step of Muse Spark in one persistent kernel: the embedding to the first layer's KV write.

The placement is in _ends.py.
"""

from _ends import ends
from _layer import named

from megagen.dsl import Machine, Schedule
from megagen.models import muse_spark


def schedule(
    machine: Machine,
    tp: int = 8,
    tokens: int = 16,
    choices: dict[str, str] | None = None,
    following: str = "sliding",
    positions: int = muse_spark.POSITIONS,
    config: muse_spark.MuseSparkConfig | None = None,
) -> Schedule:
    g = muse_spark.first(tp=tp, tokens=tokens, following=following, positions=positions, config=config)
    s, math, _, handed, _ = ends(named("muse_first", "", following), g, machine, choices, "embed", "next_qkvg")
    s.assign(g.next_heads, write=math)
    s.sync(g.next_qkvg >> g.next_heads, handed)
    return s
