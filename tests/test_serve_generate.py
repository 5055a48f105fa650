"""The loop: chunks, ends, refusals, times."""

from __future__ import annotations

from typing import Any

import pytest
from serve_fakes import Fake, continued

from megagen.errors import MegagenError
from megagen.serve.generate import Meter, Stop, generate
from megagen.serve.sampling import Sampling


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 100])
def test_a_prompt_goes_through_in_chunks(length: int) -> None:
    """The fake asserts that no step leaves a hole; its answer depends on every token of the prompt and its place."""
    fake, prompt = Fake(), [(7 * i) % 1000 for i in range(length)]
    made = list(generate(fake, prompt, max_new_tokens=20))
    assert [t.id for t in made] == continued(prompt, 20)
    chunks = [(s, min(16, length - s)) for s in range(0, length, 16)]
    assert fake.steps == chunks + [(length + i, 1) for i in range(19)]  # the last token is not run
    assert [t.stop for t in made] == [None] * 19 + [Stop.LENGTH]


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=5)])
def test_the_size_of_chunks_changes_nothing(most: int, sampling: Sampling) -> None:
    prompt = list(range(21))
    usual = [t.id for t in generate(Fake(), prompt, max_new_tokens=8, sampling=sampling)]
    assert [t.id for t in generate(Fake(most=most), prompt, max_new_tokens=8, sampling=sampling)] == usual


def test_sampling_continues_itself() -> None:
    """A run from the middle of another draws what that one drew there: of seed and position alone."""
    sampling = Sampling(temperature=1.5, seed=9)
    whole = [t.id for t in generate(Fake(), [1, 2], max_new_tokens=12, sampling=sampling)]
    rest = [t.id for t in generate(Fake(), [1, 2, *whole[:5]], max_new_tokens=7, sampling=sampling)]
    assert rest == whole[5:]
    other = [t.id for t in generate(Fake(), [1, 2], max_new_tokens=12, sampling=Sampling(temperature=1.5, seed=10))]
    assert other != whole
    assert whole != continued([1, 2], 12)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=1)])
def test_greedy_needs_no_logits(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have to be gathered from all ranks."""
    monkeypatch.setattr(Fake, "logits", None)
    assert [t.id for t in generate(Fake(), [1, 2], max_new_tokens=5, sampling=sampling)] == continued([1, 2], 5)


def test_it_stops_at_a_stop_token() -> None:
    answer = continued([3], 30)
    at = next(i for i in range(5, 30) if answer[i] not in answer[:i])
    fake = Fake()
    made = list(generate(fake, [3], max_new_tokens=30, stop={answer[at], 999_999}))
    assert [t.id for t in made] == answer[: at + 1]
    assert [t.stop for t in made] == [None] * at + [Stop.TOKEN]
    assert len(fake.steps) == at + 1


def test_a_stop_token_at_the_very_end_is_one() -> None:
    (only,) = generate(Fake(), [3], max_new_tokens=1, stop=continued([3], 1))
    assert only.stop is Stop.TOKEN


def test_full_caches_end_it() -> None:
    fake = Fake(positions=40)
    made = list(generate(fake, list(range(30))))
    assert [t.id for t in made] == continued(range(30), 11)  # type: ignore[arg-type]
    assert made[-1].stop is Stop.FULL
    assert None not in fake.cache


@pytest.mark.parametrize(
    ("ids", "new", "message"),
    [
        ([], 5, "an empty prompt"),
        ([0] * 41, None, "a prompt of 41 tokens: the caches hold 40"),
        ([0] * 30, 12, "30 tokens and 12 new ones: the caches hold 40"),
        ([0, 1000], 5, "token 1000 of the prompt: the vocabulary has 1,000"),
        ([0, -1], 5, "token -1"),
        ([0], 0, "0 new tokens"),
    ],
)
def test_it_refuses_before_anything_runs(ids: list[int], new: int | None, message: str) -> None:
    fake = Fake(positions=40)
    with pytest.raises(MegagenError, match=message):
        generate(fake, ids, max_new_tokens=new)  # not even asked for a token
    assert fake.steps == []


def test_what_just_fits() -> None:
    made = list(generate(Fake(positions=40), [0] * 30, max_new_tokens=11))
    assert len(made) == 11 and made[-1].stop is Stop.LENGTH
    assert len(list(generate(Fake(positions=40), [0] * 40))) == 1


def test_a_run_can_be_ended_between_steps() -> None:
    asked: list[int] = []

    def proceed(made: int) -> bool:
        asked.append(made)
        return made < 3

    made = list(generate(Fake(), list(range(20)), proceed=proceed))
    assert [t.id for t in made] == continued(range(20), 3)  # type: ignore[arg-type]
    assert asked == [0, 0, 1, 2, 3]
    assert made[-1].stop is None


def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only what is counted moves."""
    now = 100.0

    def pass_(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Slow(Fake):
        def step(self, ids: Any, context: int) -> list[int]:
            pass_(0.1 if len(self.steps) == 5 else 0.02)
            return super().step(ids, context)

    monkeypatch.setattr("megagen.serve.generate.perf_counter", lambda: now)
    meter, taken = Meter(), 0
    for _ in generate(Slow(), list(range(40)), max_new_tokens=10, meter=meter):
        taken += 1
        pass_(0.01)
    found = meter.statistics({"kernels": 64.0, "floor_s": 0.01})
    assert found == pytest.approx(
        {
            "prompt_tokens": 40,
            "new_tokens": taken,
            "prefill_s": 0.06,  # three chunks
            "prefill_tokens_per_s": 40 / 0.06,
            "decode_s": 8 * 0.02 + 0.1 + 9 * 0.01,
            "decode_tokens_per_s": 9 / 0.35,
            "step_ms": 20.0,
            "step_ms_p99": 100.0,
            "host_us": 10_000.0,
            "floor_ratio": 2.0,
            "kernels": 64.0,
            "floor_s": 0.01,
        }
    )
    assert "step_ms" not in Meter(prompt=1, prefill=1.0).statistics({})  # a single token
