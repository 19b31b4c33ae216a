"""Tokenizer files, encoding, decoding, and the streaming detokenizer."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.model.tokenizer import (
    MAX_CHARS,
    MAX_RUN,
    IncrementalDetokenizer,
    Tokenizer,
    TokenizerError,
    cut_long_text,
)
from tests.support.tokenizers import RESERVED, Vocabulary, special_names, write_tokenizer

VOCAB = 320
NANO = Path(__file__).parents[3] / "deploy" / "models" / "nano"


def load(folder: Path, vocab_size: int = VOCAB) -> Tokenizer:
    tokenizer = Tokenizer.load(folder, Vocabulary(vocab_size))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB))


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path, Vocabulary(VOCAB)) is None


@pytest.mark.parametrize(
    "text",
    [
        "hello the message",
        "漢字 mixed with English, 中文English混合",
        "👋🏽 ď e\u0301x 🇫🇷 👨‍👩‍👧",
        "\r\n\n  tabs\tand   spaces  \n",
        "don't WON'T 12345678 a_b-c",
        "",
        "\x00\x7f",
    ],
)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_apply_inside_words_only(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.token_text(i) for i in tokenizer.encode("hello the message")]
    assert texts == ["hello", " the", " ", "message"]


def test_numbers_split_in_groups_of_three(tmp_path: Path) -> None:
    # With a merge for "12" and "34", only the pre-tokeniser keeps "1234" from being "12","34".
    folder = write_tokenizer(tmp_path, VOCAB)
    lines = [f"{base64.b64encode(bytes([b])).decode()} {b}" for b in range(256)]
    merges = [b"12", b"34"]
    lines += [f"{base64.b64encode(t).decode()} {256 + i}" for i, t in enumerate(merges)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    tokenizer = load(folder)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("1234")] == ["12", "3", "4"]


def test_encoding_never_makes_a_special(tokenizer: Tokenizer) -> None:
    text = "".join(special_names(VOCAB)) + "<|reserved_token_300|>"
    ids = tokenizer.encode(text)
    assert max(ids) < VOCAB - RESERVED
    assert tokenizer.decode(ids, skip_special=True) == text


def test_half_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_every_id_of_the_vocabulary_decodes(tokenizer: Tokenizer) -> None:
    names = {token_id: name for name, token_id in special_names(VOCAB).items()}
    for token_id in range(VOCAB - RESERVED, VOCAB):
        text = names.get(token_id, f"<|reserved_token_{token_id}|>")
        assert tokenizer.decode([token_id]) == text
        assert tokenizer.token_bytes(token_id) == text.encode()
        plain = text in ("<|open|>", "<|close|>", "<|sep|>")
        assert tokenizer.is_special(token_id) is not plain
        assert tokenizer.decode([65, token_id, 66], skip_special=True) == f"A{text * plain}B"


def test_ids_beyond_the_tokenizer_but_inside_the_vocabulary_decode_as_reserved(
    tmp_path: Path,
) -> None:
    tokenizer = load(write_tokenizer(tmp_path, VOCAB), vocab_size=400)
    assert (tokenizer.size, tokenizer.vocab_size) == (VOCAB, 400)
    assert tokenizer.decode([399]) == "<|reserved_token_399|>"
    assert tokenizer.decode([399], skip_special=True) == ""


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**63])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match=str(token_id)):
        tokenizer.decode([65, token_id])


def test_names_are_found_by_special_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_id("<|end_of_msg|>") == VOCAB - RESERVED + 2
    assert tokenizer.special_id("<|im_end|>") is None


def reference_cut(text: str) -> list[str]:
    """The published rule, one character at a time."""
    pieces = []
    for begin in range(0, len(text), MAX_CHARS):
        block = text[begin : begin + MAX_CHARS]
        start, length, space = 0, 0, block[0].isspace()
        for i, char in enumerate(block):
            if char.isspace() != space:
                length, space = 1, not space
            else:
                length += 1
                if length > MAX_RUN:
                    pieces.append(block[start:i])
                    start, length = i, 1
        pieces.append(block[start:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "a" * MAX_RUN,
        "a" * (MAX_RUN + 1),
        "ab cd " + "x" * (3 * MAX_RUN) + " y" + " \n\u3000" * MAX_RUN + "z",
        "w " * (MAX_CHARS // 2) + "tail",
        "b" * (MAX_CHARS - 10) + " " * 20,
        "漢" * (2 * MAX_RUN + 7),
    ],
    ids=["run", "run+1", "mixed", "long", "both", "han"],
)
def test_long_text_is_cut_by_the_published_rule(tokenizer: Tokenizer, text: str) -> None:
    pieces = list(cut_long_text(text))
    assert pieces == reference_cut(text)
    assert "".join(pieces) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def rewrite(folder: Path, number: int, line: str) -> None:
    """Replace one line (from 1) of tiktoken.model."""
    path = folder / "tiktoken.model"
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (3, "AQ==", r"tiktoken.model:3: expected `base64 rank`, found 1 fields"),
        (3, "A*== 2", r"tiktoken.model:3: expected `base64 rank`"),
        (3, "Ag== two", r"tiktoken.model:3: expected `base64 rank`"),
        (3, "Ag== 7", r"tiktoken.model:3: rank 7 found where 2 comes next"),
        (3, "AQ== 2", r"tiktoken.model:3: the same token already has rank 1"),
        (66, "QUJD 65", r"no token for the single byte 0x41"),
        (3, "", r"tiktoken.model:4: rank 3 found where 2 comes next"),
    ],
)
def test_a_broken_rank_file_names_its_line(
    tmp_path: Path, number: int, line: str, message: str
) -> None:
    rewrite(write_tokenizer(tmp_path, VOCAB), number, line)
    with pytest.raises(TokenizerError, match=message):
        load(tmp_path)


def test_more_ranks_than_the_vocabulary_holds_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB)
    with pytest.raises(TokenizerError, match="does not fit vocab_size 260"):
        load(tmp_path, vocab_size=260)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON"),
        ("[]", "must be an object"),
        ('{"added_tokens_decoder": []}', "must be an object"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "key must be a token id"),
        ('{"added_tokens_decoder": {"310": "a"}}', r"\['310'\]: needs a non-empty `content`"),
        ('{"added_tokens_decoder": {"310": {"content": "a", "special": 1}}}', "boolean `special`"),
        ('{"added_tokens_decoder": {"5": {"content": "a"}}}', "id must be above the ranks"),
        ('{"added_tokens_decoder": {"320": {"content": "a"}}}', "id must be above the ranks"),
        (
            '{"added_tokens_decoder": {"310": {"content": "a"}, "311": {"content": "a"}}}',
            "already names id 310",
        ),
    ],
)
def test_a_broken_tokenizer_config_says_what_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    write_tokenizer(tmp_path, VOCAB)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(TokenizerError, match=message):
        load(tmp_path)


def test_without_a_tokenizer_config_the_reserved_ids_have_no_names(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load(tmp_path)
    assert tokenizer.decode([VOCAB - 1]) == f"<|reserved_token_{VOCAB - 1}|>"


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    """Deltas for ids cut into pieces of the given sizes (cyclic)."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    deltas, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*deltas, detokenizer.finish()]


ANY_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=40)
UTF8_IDS = st.text(max_size=12).map(lambda text: list(text.encode("utf-8", "replace")))
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(ids=ANY_IDS | UTF8_IDS, sizes=SIZES, skip=st.booleans())
def test_deltas_sum_to_the_whole_text(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool
) -> None:
    assert "".join(stream(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


@given(text=st.text(max_size=12), sizes=SIZES, cut=st.integers(0, 4))
def test_whole_characters_stream_without_replacements(
    tokenizer: Tokenizer, text: str, sizes: list[int], cut: int
) -> None:
    raw = text.encode("utf-8", "replace").replace("\ufffd".encode(), b"?")
    deltas = stream(tokenizer, list(raw), sizes, skip=True)
    assert "".join(deltas) == raw.decode()
    # A stream cut inside a character shows it once, at the very end.
    short = raw[: len(raw) - cut]
    *shown, tail = stream(tokenizer, list(short), sizes, skip=True)
    assert "\ufffd" not in "".join(shown)
    assert tail in ("", "\ufffd")


def test_two_streams_do_not_share_half_characters(tokenizer: Tokenizer) -> None:
    one, two = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    wave, han = "👋".encode(), "漢".encode()
    assert [one.push([wave[0]]), two.push([han[0]])] == ["", ""]
    assert [one.push(list(wave[1:])), two.push(list(han[1:]))] == ["👋", "漢"]
    assert one.finish() == two.finish() == ""


@pytest.mark.skipif(not (NANO / "tiktoken.model").exists(), reason="the bundled model is absent")
def test_the_bundled_tokenizer_loads() -> None:
    vocab_size = json.loads((NANO / "config.json").read_text())["text_config"]["vocab_size"]
    tokenizer = load(NANO, vocab_size)
    text = "The quick brown fox, 漢字 👋🏽\n\n  12345"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("The time of the day")) < 10
    assert tokenizer.special_id("<|open|>") is not None
