"""Incremental detokenisation and stop strings: whole characters, whole truth, whatever the token boundaries."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cukern.engine.text import ByteDetokenizer, StopMatcher, WindowDetokenizer, byte_level_bytes
from cukern.engine.tokenizer import Tokenizer, read_json
from cukern.models import demo_checkpoint


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(demo_checkpoint())


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    """Byte-level vocabulary: one token a byte (256 + a space-a token), a special and an ordinary added token."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    vocab["Ġa"] = len(vocab)
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(["<|end|>"])
    built.add_tokens(["<think>", "naïve word"])
    built.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    inverse = {tokenizer.token_bytes(i): i for i in range(256)}
    return [inverse[bytes([b])] for b in data]


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


def test_emoji_of_four_byte_tokens_comes_out_whole(byte_tokenizer):
    ids = [*ids_of(byte_tokenizer, "😸".encode()), byte_tokenizer.token_id("Ġa")]
    assert pieces_of(byte_tokenizer, ids) == ["", "", "", "😸", " a", ""]
    assert byte_tokenizer.decode(ids) == "😸 a"


def test_truncated_character_is_flushed_at_the_end(byte_tokenizer):
    ids = [*ids_of(byte_tokenizer, "😸".encode()[:3]), byte_tokenizer.token_id("<|end|>")]
    pieces = pieces_of(byte_tokenizer, ids)
    assert pieces[:-1] == [""] * 4
    assert "".join(pieces) == byte_tokenizer.decode(ids) == "\ufffd"


def test_invalid_byte_becomes_one_replacement_and_stalls_nothing(byte_tokenizer):
    ids = ids_of(byte_tokenizer, b"\xffok")
    assert pieces_of(byte_tokenizer, ids) == ["\ufffd", "o", "k", ""]
    assert byte_tokenizer.decode(ids) == "\ufffdok"


def test_unfinished_character_followed_by_a_space_token(byte_tokenizer):
    ids = [*ids_of(byte_tokenizer, b"\xf0\x9f\x98"), byte_tokenizer.token_id("Ġa")]
    pieces = pieces_of(byte_tokenizer, ids)
    assert pieces[:3] == ["", "", ""]
    assert "".join(pieces) == byte_tokenizer.decode(ids) == "\ufffd a"


def test_any_bytes_streamed_equal_decoding_at_once(byte_tokenizer):
    generator = random.Random(0)
    pool = [b"a", b" ", "é".encode(), "漢".encode(), "😸".encode(), b"\xff", b"\xc0"]
    pool += [b"\xe6\xbc", b"\xf0\x9f", b"\xed\xa0\x80"]
    for _ in range(300):
        data = b"".join(generator.choices(pool, k=generator.randrange(1, 12)))
        ids = ids_of(byte_tokenizer, data)
        for at in range(len(ids)):
            if generator.random() < 0.05:
                ids.insert(at, byte_tokenizer.token_id(generator.choice(["<|end|>", "<think>", "naïve word"])))
        pieces = pieces_of(byte_tokenizer, ids)
        assert "".join(pieces) == byte_tokenizer.decode(ids)


def test_special_tokens_give_no_text_but_added_ones_do(byte_tokenizer):
    ids = [byte_tokenizer.token_id(t) for t in ("<think>", "<|end|>", "naïve word")]
    assert pieces_of(byte_tokenizer, ids) == ["<think>", "", "naïve word", ""]


def test_id_without_a_token_gives_nothing(byte_tokenizer):
    assert pieces_of(byte_tokenizer, [5000]) == ["", ""]


def test_demo_tokenizer_round_trip(demo):
    for text in ["According to a careful calculation", "The whale 鯨 is large 🐋\n\n1851!", " leading and trailing "]:
        ids = demo.encode(text)
        assert demo.decode(ids) == text
        assert "".join(pieces_of(demo, ids)) == text
    assert demo.encode("") == []


def test_byte_alphabet_is_that_of_the_library():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_bytes(c) for c in alphabet) == [bytes([b]) for b in range(256)]


def test_every_token_of_the_demo_has_the_bytes_the_library_decodes(demo):
    for token in range(demo.vocab_size):
        assert demo.token_bytes(token).decode("utf-8", "replace") == demo.decode([token])


def word_tokenizer(tmp_path) -> Tokenizer:
    """A vocabulary that is not byte-level: words with a metaspace decoder, which strips the first space."""
    vocab = {"▁the": 0, "▁whale": 1, "s": 2, "<unk>": 3}
    built = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    built.decoder = decoders.Metaspace()
    built.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_other_vocabularies_are_decoded_by_window(tmp_path):
    tokenizer = word_tokenizer(tmp_path)
    ids = [0, 1, 2, 0, 1]
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    assert pieces_of(tokenizer, ids) == ["the", " whale", "s", " the", " whale", ""]


def test_window_holds_unfinished_text_back_but_not_for_ever():
    table = {0: b"\xf0\x9f", 1: b"\x98\xb8", 2: b"\xff", 3: b"ok"}

    def decode(ids):
        return b"".join(table[i] for i in ids).decode("utf-8", "replace")

    window = WindowDetokenizer(decode)
    assert [window.add(i) for i in (0, 1, 3)] == ["", "😸", "ok"]
    window = WindowDetokenizer(decode)
    pieces = [window.add(2) for _ in range(20)]
    assert "".join(pieces).count("\ufffd") >= 16
    window = WindowDetokenizer(decode)
    assert window.add(0) == ""
    assert window.finish() == "\ufffd"


def test_byte_detokenizer_emits_nothing_twice():
    detokenizer = ByteDetokenizer(lambda i: "漢".encode()[i : i + 1])
    assert [detokenizer.add(i) for i in range(3)] == ["", "", "漢"]
    assert detokenizer.finish() == ""


# -- stop strings --------------------------------------------------------------------------------------------------


def run_stops(stops, pieces):
    matcher = StopMatcher(stops)
    out = [matcher.add(p) for p in pieces]
    if matcher.matched is None:
        out.append(matcher.finish())
    return out, matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["END"], ["a E", "N", "D b"], "a ", "END"),
        (["END"], ["a E", "N", "X"], "a ENX", None),
        (["END"], ["EEN", "D"], "E", "END"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abc", "b"], ["a", "b", "c"], "a", "b"),
        (["abc", "b"], ["abc"], "a", "b"),
        (["xab", "ab"], ["zxab"], "z", "xab"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", "\n\n"),
        (["é"], ["caf", "é!"], "caf", "é"),
        ([], ["a", "b"], "ab", None),
    ],
)
def test_stop_strings(stops, pieces, text, matched):
    out, found = run_stops(stops, pieces)
    assert ("".join(out), found) == (text, matched)


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    out, _ = run_stops(["stop"], ["s", "t", "r", "ing st", "op"])
    assert out == ["", "", "str", "ing ", ""]


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["x"])
    assert matcher.add("axb") == "a"
    assert matcher.add("more") == ""


def test_the_result_does_not_depend_on_how_the_text_is_cut():
    generator = random.Random(1)
    for _ in range(500):
        text = "".join(generator.choices("ab", k=12))
        count = generator.randrange(1, 4)
        stops = ["".join(generator.choices("ab", k=generator.randrange(1, 5))) for _ in range(count)]
        expected = run_stops(stops, list(text))
        cut = sorted(generator.sample(range(1, 12), generator.randrange(0, 6)))
        pieces = [text[i:j] for i, j in zip([0, *cut], [*cut, 12])]
        got = run_stops(stops, pieces)
        assert ("".join(got[0]), got[1]) == ("".join(expected[0]), expected[1]), (text, stops, pieces)


# -- files ---------------------------------------------------------------------------------------------------------


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(demo_checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    path.write_text(json.dumps(data))
    text = "According to a careful calculation I have made"
    assert Tokenizer(folder).encode(text) == Tokenizer(demo_checkpoint()).encode(text)


def test_lone_surrogate_is_refused(demo):
    with pytest.raises(ValueError, match=r"text holds a lone surrogate.*character 2"):
        demo.encode("ab\ud800")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "not a tokenizer that"),
    ],
)
def test_broken_tokenizer_file(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_absent_tokenizer_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    assert read_json(tmp_path / "generation_config.json") == {}


def test_eos_token_of_the_configuration(demo):
    assert demo.eos_token_id == 4093
    assert demo.token_id("no such token") is None
