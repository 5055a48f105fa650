"""`megagen decode` and Engine: from a prompt in any form to text, ids or JSON; refusals; Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import Decoders, Fake, continued
from test_serve_ranks import alive
from test_serve_text import checkpoint as checkpoint  # a fixture
from test_serve_text import configure
from typer.testing import CliRunner

from megagen.cli import main
from megagen.errors import DeviceError, HangError, MegagenError, RankError, WeightError
from megagen.serve import engine
from megagen.serve.engine import Engine, Here
from megagen.serve.generate import Stop
from megagen.serve.sampling import Sampling
from megagen.serve.text import Text

TESTS = Path(__file__).parent
VOCAB = 290  # of the tokenizer, about
ROOM = 10**12


@pytest.fixture(autouse=True)
def decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Fakes in the place of decoders; gives what they were opened with."""
    monkeypatch.setattr(engine, "_decoder", lambda: Decoders)
    monkeypatch.setattr(engine, "_free", lambda gpu: ROOM)
    monkeypatch.setattr(engine, "OPEN", "serve_fakes:make_decoder")
    for name in engine.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    Decoders.opened.clear()
    yield Decoders.opened


@pytest.fixture
def model(checkpoint: Path) -> Path:
    configure(checkpoint, {"fake": {"vocab": VOCAB}}, None)
    return checkpoint


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkpoint without a tokenizer."""
    folder = tmp_path / "bare"
    folder.mkdir()
    configure(folder, {"fake": {"vocab": VOCAB, "step_s": 0.002}}, None)
    return folder


def decode(*args: object, code: int = 0, stdin: str = "") -> Any:
    result = CliRunner().invoke(main.app, ["decode", *map(str, args)], input=stdin, prog_name="megagen")
    assert result.exit_code == code, result.output
    return result


def answer(model: Path, prompt: list[int], tokens: int) -> str:
    text = Text.load(model)
    assert text is not None
    made = continued(prompt, tokens, VOCAB)
    assert text.id("<|eot|>") not in made
    return text.decode([*prompt, *made])[len(text.decode(prompt)) :]


def test_text(model: Path, tmp_path: Path, decoders: list[dict[str, Any]]) -> None:
    text = Text.load(model)
    assert text is not None
    wanted = answer(model, text.encode("the words"), 9) + "\n"
    got = decode("--model", model, "--prompt", "the words", "--max-new-tokens", 9)
    assert got.stdout == wanted
    assert "weights" in got.stderr and "4.13" in got.stderr  # GB together
    assert decoders[0]["positions"] == 128 and decoders[0]["tp"] == decoders[0]["live"] == 1
    (tmp_path / "prompt").write_text("the words")
    assert decode("--model", model, "--prompt-file", tmp_path / "prompt", "--max-new-tokens", 9).stdout == wanted
    piped = decode("--model", model, "--prompt-file", "-", "--max-new-tokens", 9, "--quiet", stdin="the words")
    assert (piped.stdout, piped.stderr) == (wanted, "")


def test_chat(model: Path) -> None:
    text = Text.load(model)
    assert text is not None
    got = decode("--model", model, "--prompt", "the words", "--chat", "--max-new-tokens", 4)
    assert got.stdout == answer(model, text.encode("the words", chat=True), 4) + "\n"


def test_ids_without_a_tokenizer(bare: Path) -> None:
    got = decode("--model", bare, "--prompt-ids", "1,2,3", "--max-new-tokens", 5)
    assert [int(i) for i in got.stdout.split()] == continued([1, 2, 3], 5, VOCAB)
    refused = decode("--model", bare, "--prompt", "text", code=1)
    assert "has no tokenizer" in refused.stderr and "--prompt-ids" in refused.stderr
    found = json.loads(decode("--model", bare, "--prompt-ids", "1,2,3", "--max-new-tokens", 5, "--json").stdout)
    assert found["text"] is None and found["ids"] == continued([1, 2, 3], 5, VOCAB)


def test_json_and_times(model: Path) -> None:
    got = decode("--model", model, "--prompt", "the", "--max-new-tokens", 6, "--json", "--stats")
    found = json.loads(got.stdout)
    assert found["prompt_ids"] and len(found["ids"]) == 6 and found["stop"] == "max_new_tokens"
    assert found["text"] == answer(model, found["prompt_ids"], 6)
    assert found["statistics"]["new_tokens"] == 6 and found["statistics"]["floor_ratio"] > 0
    assert "decode tokens per s" in got.stderr and "ended by: max_new_tokens" in got.stderr
    one = json.loads(decode("--model", model, "--prompt", "the", "--max-new-tokens", 1, "--json", "--stats").stdout)
    assert one.keys() == found.keys() and one["statistics"].keys() >= found["statistics"].keys()
    assert one["statistics"]["step_ms"] is None


def test_a_stop_token_is_told_and_not_printed(bare: Path) -> None:
    made = continued([1], 12, VOCAB)
    assert made.index(made[10]) == 10
    configure(bare, {"fake": {"vocab": VOCAB}}, {"eos_token_id": [made[10]]})
    got = decode("--model", bare, "--prompt-ids", "1", "--stats")
    assert [int(i) for i in got.stdout.split()] == made[:10]
    assert "ended by: stop token" in got.stderr


def test_full_caches(bare: Path) -> None:
    got = decode("--model", bare, "--prompt-ids", ",".join(["5"] * 100), "--context", 120)  # rounded to 128
    assert len(got.stdout.split()) == 29
    assert "the caches are full: they hold 128 tokens" in got.stderr


def test_sampling(bare: Path) -> None:
    common = ("--model", bare, "--prompt-ids", "1", "--max-new-tokens", 20, "--temperature", 2, "--top-k", 90)
    one, same = (decode(*common, "--top-p", 0.9, "--seed", 3).stdout for _ in range(2))
    assert one == same != decode(*common, "--top-p", 0.9, "--seed", 4).stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "one of --prompt, --prompt-ids and --prompt-file"),
        (("--prompt-ids", "1", "--prompt", "x"), 2, "one of"),
        (("--prompt-ids", "1,x"), 2, "numbers, separated by commas"),
        (("--prompt-ids", "1", "--chat"), 2, "--chat"),
        (("--prompt-ids", "1", "--top-p", "0"), 1, "top_p"),
        (("--prompt-ids", "1", "--context", "128", "--max-new-tokens", "500"), 1, "the caches hold 128"),
        (("--prompt-ids", "1", "--model", "/nowhere"), 1, "is no checkpoint"),
        (("--prompt-ids", "290"), 1, "the vocabulary has 290"),
        (("--prompt-file", "/nowhere"), 1, "No such file"),
    ],
)
def test_refusals(model: Path, args: tuple[str, ...], code: int, message: str) -> None:
    assert message in decode("--model", model, *args, code=code).stderr


def test_what_does_not_fit_is_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_free", lambda gpu: 3_000_000_000)
    got = decode("--model", bare, "--prompt-ids", "1", code=1)
    assert "4.3 GB are needed on GPU 0, of which 3.0 GB are free" in got.stderr
    assert Decoders.opened == []


def test_emulated(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_free", None)  # no GPU is asked
    decode("--model", bare, "--prompt-ids", "1", "--max-new-tokens", 2, "--tp", 2, "--emulate")
    assert Decoders.opened[0]["emulate"] is True and Decoders.opened[0]["tp"] == 2


def test_without_transformers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    got = decode("--model", model, "--prompt", "x", code=1)
    assert "the tokenizer needs transformers" in got.stderr and "pip install" in got.stderr


def test_engine(model: Path) -> None:
    with Engine.from_pretrained(model, max_positions=200) as made:
        assert (made.vocab, made.positions) == (VOCAB, 256)
        run = made.generate("the words", max_new_tokens=8)
        tokens = list(run)
        assert [t.id for t in tokens] == run.ids == continued(run.prompt, 8, VOCAB)
        assert "".join(t.text for t in tokens) == run.text == answer(model, run.prompt, 8)
        assert run.stop is Stop.LENGTH and run.statistics["new_tokens"] == 8
        again = made.generate(run.prompt, max_new_tokens=8, sampling=Sampling(1.0, seed=1))
        next(again)
        again.close()
        assert list(made.generate(run.prompt, max_new_tokens=3, stop={run.ids[0]}))[-1].stop is Stop.TOKEN
        with pytest.raises(MegagenError, match="the vocabulary has"):
            made.generate([VOCAB])


@pytest.mark.parametrize(("error", "closed"), [(HangError("", record=None), True), (DeviceError(""), False)])
def test_an_engine_closes_what_does_not_hang(error: DeviceError, closed: bool) -> None:
    fake = Fake()
    with pytest.raises(DeviceError), Engine(Here(fake)):
        raise error
    assert fake.closed is closed


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with main._working("loading") as told:
        told()
        told("packing: 1 of 2 GB", 1e9, 2e9)
    assert "packing: 1 of 2 GB" in shown.getvalue()


def test_engine_on_ranks(model: Path) -> None:
    with Engine.from_pretrained(model, tp=2) as made:
        run = made.generate("the words", max_new_tokens=8)
        assert "".join(t.text for t in run) == answer(model, run.prompt, 8)
        assert run.statistics["new_tokens"] == 8
    with pytest.raises(RankError), Engine.from_pretrained(model, tp=2) as made:
        os.kill(made._source.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        list(made.generate("the words", max_new_tokens=300))


def test_the_example_of_the_page(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = model

    def example() -> None:
        from megagen.serve.engine import Engine
        from megagen.serve.sampling import Sampling

        with Engine.from_pretrained(directory, tp=2) as model:
            run = model.generate("the words", max_new_tokens=64, sampling=Sampling(temperature=0.8, top_p=0.95, seed=7))
            for token in run:
                sys.stdout.write(token.text)
            sys.stdout.write(f"\n{run.stop}, {run.statistics['decode_tokens_per_s']:.1f} tokens/s\n")

    configure(model, {"fake": {"vocab": VOCAB, "draws": True}}, None)
    example()
    assert re.search(r"\n(max_new_tokens|stop token), \d+\.\d tokens/s\n$", capsys.readouterr().out)


def test_a_rank_of_torchrun(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(engine.TORCHRUN, ("1", "4", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with Engine.from_pretrained(bare, tp=4) as made:
        assert made.rank == 1
        assert [t.id for t in made.generate([1], max_new_tokens=3)] == continued([1], 3, VOCAB)
    assert (Decoders.opened[0]["rank"], Decoders.opened[0]["live"]) == (1, 4)
    assert decode("--model", bare, "--prompt-ids", "1", "--tp", 4).stdout == ""  # rank 0 speaks
    with pytest.raises(MegagenError, match="torchrun started 4 ranks"):
        Engine.from_pretrained(bare, tp=2)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"no config\.json"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(DeviceError, match="are needed on GPU 3"):
        engine.refuse_too_large([("weights", 5), ("caches", 6)], 10, 3)


# -- in a process of its own -------------------------------------------------------------------------------------------


def started(*args: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.Popen(
        [sys.executable, str(TESTS / "serve_fakes.py"), "decode", *args, "--tp", "3", "--prompt-ids", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever started the tests may ignore it
    )


def ranks(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(c) for c in children]


def test_ctrl_c(bare: Path) -> None:
    """While it answers: at once, exit code 130, no traceback, nobody left."""
    with started("--model", str(bare), "--context", "4096") as process:
        assert process.stdout is not None and process.stdout.read(8)
        pids = ranks(process.pid)
        assert len(pids) == 3
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert time.monotonic() - began < 5
    assert process.returncode == 130
    assert "stopping" in err and "Traceback" not in err and "error" not in err
    assert not any(map(alive, pids))


def test_ctrl_c_while_loading(bare: Path) -> None:
    with started("--model", str(bare), "--context", "4096") as process:
        deadline = time.monotonic() + 20
        while len(pids := ranks(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not any(map(alive, pids))


def test_a_killed_rank(bare: Path) -> None:
    with started("--model", str(bare), "--context", "4096") as process:
        assert process.stdout is not None and process.stdout.read(8)
        pids = ranks(process.pid)
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        _, err = process.communicate(timeout=10)
        assert time.monotonic() - began < 5
    assert process.returncode == 1
    assert re.search(rf"^error: rank \d \(pid {pids[1]}\) was killed by signal 9 \(SIGKILL\)$", err, re.M)
    assert "Traceback" not in err
    assert not any(map(alive, pids))


def test_a_closed_pipe(bare: Path) -> None:
    with started("--model", str(bare), "--context", "4096") as process:
        assert process.stdout is not None and process.stdout.read(8)
        pids = ranks(process.pid)
        process.stdout.close()
        process.wait(10)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert not any(map(alive, pids))
