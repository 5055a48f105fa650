"""A sliding-window layer of Muse Spark in one persistent kernel: its attention to the next layer's KV write.

The placement is that of every layer, see _layer.py.
"""

from _layer import layer, named

from megagen.dsl import Machine, Schedule
from megagen.models import muse_spark


def schedule(
    machine: Machine,
    tp: int = 8,
    tokens: int = 16,
    choices: dict[str, str] | None = None,
    split: str = "nn",
    experts: str = "nvfp4",
    all_reduce: str = "",  # two shots, unless there is one rank
    following: str = "sliding",
    positions: int = muse_spark.POSITIONS,
    config: muse_spark.MuseSparkConfig | None = None,
) -> Schedule:
    all_reduce = all_reduce or ("two_shot" if tp > 1 else "one_shot")
    g = muse_spark.sliding_layer(
        tp=tp,
        tokens=tokens,
        split=split,
        experts=experts,
        all_reduce=all_reduce,
        following=following,
        positions=positions,
        config=config,
    )
    return layer(named("muse_swa", experts, following), g, machine, choices, all_reduce)
