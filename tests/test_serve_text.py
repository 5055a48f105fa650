"""Tokenizers as checkpoints hold them: text that comes in pieces, stop tokens, what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megagen.errors import MegagenError, WeightError
from megagen.serve.text import WINDOW, Text, stop_ids

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["<|begin|>", "<|end_of_text|>", "<|eom|>", "<|eot|>", "<|start|>", "<|message|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SAMPLES = [
    "plain words",
    "über Größe, naïve",
    "日本語のテキスト",
    "👩‍👩‍👧 and 🏳️‍🌈!",
    "a\n\tb  c ",
    "<|start|>x<|eom|>",
    "\ufffd itself",
    "",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer, a few merges, as transformers saves it; and configurations with ends of answers."""
    from transformers import PreTrainedTokenizerFast

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the words of some text, the text of some words"] * 4, trainer)
    folder = tmp_path_factory.mktemp("checkpoint")
    made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end_of_text|>", chat_template=TEMPLATE)
    made.save_pretrained(folder)
    ids = {t: made.convert_tokens_to_ids(t) for t in SPECIAL}
    configure(folder, {"model_type": "muse_spark", "text_config": {"eos_token_id": ids["<|end_of_text|>"]}}, None)
    return folder


def configure(folder: Path, config: object, generation: object) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> Text:
    found = Text.load(checkpoint)
    assert found is not None
    return found


@pytest.mark.parametrize("sample", SAMPLES)
def test_pieces_are_the_whole(text: Text, sample: str) -> None:
    ids = text.encode(sample)
    stream = text.stream(text.encode("before "))
    pieces = [stream.add(i) for i in ids]
    assert "".join(pieces) + stream.end() == sample
    if "\ufffd" not in sample:
        assert not any("\ufffd" in p for p in pieces), "a part of a character was given"
    assert text.decode(ids) == sample


def test_a_character_comes_with_its_last_byte(text: Text) -> None:
    ids = text.encode("€")
    assert len(ids) == 3
    stream = text.stream()
    assert [stream.add(i) for i in ids] == ["", "", "€"]


def test_half_a_character_is_given_at_the_end(text: Text) -> None:
    stream = text.stream()
    assert [stream.add(i) for i in text.encode("a€")[:3]] == ["a", "", ""]
    assert stream.end() == "\ufffd"
    assert stream.end() == ""


def test_bytes_that_are_no_text(text: Text) -> None:
    """A model may put any bytes together. What is given stays within a window, and is what Python makes of them."""
    alphabet = {i: text.id(c) for i, c in enumerate(byte_level())}
    rng = random.Random(0)
    for case in range(30):
        raw = bytes(rng.choice([0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF, 0xF0, 0x80]) for _ in range(60))
        stream = text.stream()
        found = "".join(stream.add(alphabet[b]) for b in raw) + stream.end()  # type: ignore[arg-type]
        assert found == raw.decode(errors="replace"), (case, raw)
    stream = text.stream()
    for _ in range(4 * WINDOW):
        stream.add(alphabet[0xFF])  # type: ignore[arg-type]
        assert len(stream._ids) <= WINDOW


def byte_level() -> list[str]:
    """The characters that stand for bytes 0 to 255, after GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


def test_special_tokens_stay(text: Text) -> None:
    stream = text.stream()
    ids = [text.id("<|start|>"), *text.encode("assistant"), text.id("<|message|>")]
    assert "".join(stream.add(i) for i in ids) == "<|start|>assistant<|message|>"  # type: ignore[arg-type]


def test_chat(text: Text) -> None:
    ids = text.encode("the words", chat=True)
    assert text.decode(ids) == "<|start|>user<|message|>the words<|eot|><|start|>assistant"
    assert ids[0] == text.id("<|start|>") and ids.count(text.id("<|eot|>")) == 1  # type: ignore[arg-type]
    assert text.encode("the words") == ids[ids.index(text.id("<|message|>")) + 1 : ids.index(text.id("<|eot|>"))]  # type: ignore[arg-type]


def test_no_template(text: Text, checkpoint: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    bare = Text.load(tmp_path)
    assert bare is not None and bare.encode("x")
    with pytest.raises(MegagenError, match="no chat template"):
        bare.encode("x", chat=True)


def test_stop_tokens(text: Text, checkpoint: Path) -> None:
    end, eom, eot = (text.id(t) for t in ("<|end_of_text|>", "<|eom|>", "<|eot|>"))
    own = {"eos_token_id": end}
    try:
        assert stop_ids(checkpoint, text) == {end, eot}
        assert stop_ids(checkpoint, None) == {end}
        configure(checkpoint, {"text_config": own}, {"eos_token_id": [eom, 77]})
        assert stop_ids(checkpoint, text) == {end, eot, 77}  # the end of a message is no end of the answer
        configure(checkpoint, {"eos_token_id": 5, "text_config": None}, {"eos_token_id": 6})
        assert stop_ids(checkpoint, None) == {5, 6}
        configure(checkpoint, {}, {"eos_token_id": None})
        assert stop_ids(checkpoint, None) == frozenset()
        configure(checkpoint, {"eos_token_id": ["x"]}, None)
        with pytest.raises(WeightError, match=r"config\.json"):
            stop_ids(checkpoint, None)
    finally:
        configure(checkpoint, {"model_type": "muse_spark", "text_config": own}, None)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert Text.load(tmp_path) is None


def test_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightError, match="cannot be read"):
        Text.load(tmp_path)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer.json").write_text((checkpoint / "tokenizer.json").read_text())
    with pytest.raises(WeightError):
        Text.load(tmp_path)
    assert not (tmp_path / "ran").exists()
