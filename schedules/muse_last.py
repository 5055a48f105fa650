"""What ends a decoding step of Muse Spark in one persistent kernel: the final norm to each token's successor.

The placement is in _ends.py. The head's weights are most of what there is to do, and nothing keeps them waiting.
"""

from _ends import ends

from megagen.dsl import Machine, Schedule
from megagen.models import muse_spark


def schedule(
    machine: Machine,
    tp: int = 8,
    tokens: int = 16,
    choices: dict[str, str] | None = None,
    config: muse_spark.MuseSparkConfig | None = None,
) -> Schedule:
    g = muse_spark.last(tp=tp, tokens=tokens, config=config)
    s, math, single, handed, exchange = ends("muse_last", g, machine, choices, "final_norm", "lm_head")
    s.assign(g.choose, score=math, pick=single, agree=single)
    s.sync(g.lm_head >> g.choose, handed)
    s.sync(g.choose.score >> g.choose.pick, handed)
    s.sync(g.choose.pick >> g.choose.agree, exchange)
    return s
