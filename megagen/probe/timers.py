"""The clocks that everything else is measured with."""

from __future__ import annotations

from megagen.probe.case import Sample
from megagen.probe.gpu import Gpu

SEEN = 256  # values of the timer
READS = 64  # of each clock, one after another
ROUNDS = 64  # meetings of a launch
EMPTY = 4  # the cost of adding a constant instead of a clock


def timer(gpu: Gpu) -> list[Sample]:
    """How finely the GPU's nanosecond timer steps, what reading a clock costs, how well the SMs' timers agree.

    One thread notes 256 different values that %globaltimer shows in a row, the least difference is its step, and reads
    each clock 64 times, adding the values up. Then all SMs meet 64 times and each reads its timer as it leaves: the
    spread is between the first and the last of a meeting. A SM's lead is the median of its leads over the median SM,
    the offset how far these are apart. Both hold what leaving takes, so timers differ by less.

    Decides how short an interval a trace can show, what a time stamp costs, and whether stamps of two SMs compare.
    """
    read = gpu.kernel("timer", "probe_timer_read", blocks=1)
    spread = gpu.kernel("timer", "probe_timer_spread")
    seen, costs, sink = gpu.zeros(SEEN), gpu.zeros(5, words=4), gpu.zeros(1)
    times = gpu.zeros(ROUNDS, gpu.sms)
    steps, clks, apart, offset, meeting, mhz = [], [], [], [], [], []
    for _ in range(gpu.runs(21)):
        gpu.run(read, seen, SEEN, costs, sink)
        (shown,) = gpu.times(seen)
        steps.append(float(shown.diff().min()))
        found = gpu.read(costs) / READS
        clks.append((found - found[EMPTY]).clamp(min=0).tolist())
        mhz.append(1e3 / gpu.run(spread, times, ROUNDS))
        left = gpu.times(times)[0][2:]
        apart.append(float((left.amax(1) - left.amin(1)).median()))
        lead = (left - left.median(1, keepdim=True).values).median(0).values
        offset.append(float(lead.max() - lead.min()))
        meeting.append(float((left[-1] - left[0]).median()) / (len(left) - 1))
    step = sorted(steps)[len(steps) // 2]
    names = ("globaltimer_read", "globaltimer_low_read", "clock64_read", "clock_read")
    what = ("%globaltimer", "the low word of %globaltimer", "%clock64", "%clock")
    return [
        Sample("timer_step_ns", "ns", steps, "the least between two values of %globaltimer in a row"),
        *(
            Sample(f"{name}_clk", "clk", [c[i] for c in clks], f"reading {what[i]}, once of {READS} in a row", 1)
            for i, name in enumerate(names)
        ),
        Sample("timer_spread_ns", "ns", apart, "first to last SM's timer as they leave a meeting", step, True),
        Sample("timer_offset_ns", "ns", offset, "the SMs' timers are no further apart, meetings' medians", step, True),
        Sample("timer_meeting_ns", "ns", meeting, "a meeting of all SMs, one thread each"),
        Sample("sm_clock_mhz", "MHz", mhz, "clocks of a SM in its timer's time"),
    ]
