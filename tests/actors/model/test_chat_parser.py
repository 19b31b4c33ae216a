"""Parsing generated ids: what a stream adds up to, and what broken answers still give."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.model.chat import CallDelta, ChatDelta, ChatParser, render_chat
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.support.chat import VOCAB, load_tokenizer
from tests.support.tokenizers import special_names

SPECIAL = special_names(VOCAB)
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tmp_path_factory.mktemp("k3"))


def tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of generated text; markers in it are the real ids."""
    for marker in MARKERS:
        text = text.replace(marker, f"\0{marker}\0")
    ids: list[int] = []
    for piece in text.split("\0"):
        ids += [SPECIAL[piece]] if piece in MARKERS else tokenizer.encode(piece)
    return ids


def parse(
    tokenizer: Tokenizer,
    ids: list[int],
    thinking: bool = True,
    sizes: tuple[int, ...] = (1 << 20,),
    cut: bool = False,
    **options: Any,
) -> ChatDelta:
    """The sum of all deltas when ids arrive in pieces of the given sizes (cyclic)."""
    parser = ChatParser(tokenizer, thinking, **options)
    whole, at, turn = ChatDelta(), 0, 0
    deltas = []
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(parser.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    for delta in [*deltas, parser.finish(cut)]:
        whole.reasoning += delta.reasoning
        whole.content += delta.content
        for piece in delta.tool_calls:
            if piece.name:
                assert piece.index == len(whole.tool_calls) and piece.id
                whole.tool_calls.append(CallDelta(piece.index, "", piece.id, piece.name))
            whole.tool_calls[piece.index].arguments += piece.arguments
    return whole


CALL = (
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
TURN = (
    "reasoning<|close|>think<|sep|><|open|>response<|sep|>text<|close|>response<|sep|>"
    f"<|open|>tools<|sep|>{CALL}<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)
F = CallDelta(0, '{"x": 1}', "functions.f:0", "f")
G = CallDelta(1, '{"x": 1}', "functions.f:1", "f")
EMPTY = CallDelta(1, "{}", "functions.f:1", "f")


def test_the_published_example(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, tokens(tokenizer, TURN)) == ChatDelta("reasoning", "text", [F])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A repeated opening marker, and none.
        ("<|open|>think<|sep|>r<|close|>think<|sep|>", ChatDelta("r")),
        ("r<|close|>think<|sep|>", ChatDelta("r")),
        # An empty think.
        ("<|close|>think<|sep|><|open|>response<|sep|>t", ChatDelta("", "t")),
        # The response opens although think never closed.
        ("r<|open|>response<|sep|>t<|close|>response<|sep|>", ChatDelta("r", "t")),
        # The response closes although it never opened: the text was the answer.
        ("t<|close|>response<|sep|><|close|>message<|sep|>", ChatDelta("t", "t")),
        # Text between the elements.
        ("r<|close|>think<|sep|>\n t<|close|>response<|sep|>", ChatDelta("r", "t")),
        ("r<|close|>think<|sep|>\n<|open|>response<|sep|>\nt", ChatDelta("r", "\nt")),
        # Text after the elements.
        ("<|open|>response<|sep|>t<|close|>response<|sep|>x", ChatDelta("", "t")),
        # Cut off: in think, in a tag, in a call, which then counts as far as it came.
        ("rea", ChatDelta("rea")),
        ("r<|close|>thi", ChatDelta("r")),
        ("r<|close|>think<|sep|><|open|>resp", ChatDelta("r")),
        ("<|open|>tools<|sep|>" + CALL + CALL[:20], ChatDelta("", "", [F])),
        ("<|open|>tools<|sep|>" + CALL + CALL[:60], ChatDelta("", "", [F, EMPTY])),
        # Tools: never opened, never closed.
        ("r<|close|>think<|sep|>" + CALL, ChatDelta("r", "", [F])),
        ("<|open|>tools<|sep|>" + CALL + "<|end_of_msg|>", ChatDelta("", "", [F])),
        # A call without a name, and one that another call ends.
        ("<|open|>tools<|sep|>" + CALL.replace(' tool="f"', "") + CALL, ChatDelta("", "", [F])),
        ("<|open|>tools<|sep|>" + CALL.split("<|close|>call")[0] + CALL,
         ChatDelta("", "", [F, G])),
        # The argument ends with its call.
        ("<|open|>tools<|sep|>" + CALL.replace("<|close|>argument<|sep|>", ""),
         ChatDelta("", "", [F])),
        # Stray markers lose their marker only.
        ("a<|sep|>b", ChatDelta("ab")),
        ("a<|open|>b<|close|>think<|sep|>", ChatDelta("ab")),
        ("a<|open|>" + "b" * 3000, ChatDelta("a" + "b" * 3000)),
        ("a<|open|>shout<|sep|>b<|close|>shout<|sep|>c", ChatDelta("abc")),
        # Everything after the end is ignored; it ends an open call as well.
        (CALL.replace("<|close|>argument", "<|end_of_msg|>2<|close|>argument"),
         ChatDelta("", "", [F])),
        ("r<|end_of_msg|>x", ChatDelta("r")),
    ],
)  # fmt: skip
def test_broken_answers_give_what_can_be_saved(
    tokenizer: Tokenizer, text: str, expected: ChatDelta
) -> None:
    assert parse(tokenizer, tokens(tokenizer, text)) == expected
    assert parse(tokenizer, tokens(tokenizer, text), sizes=(1,)) == expected


def test_without_thinking_the_text_is_the_response(tokenizer: Tokenizer) -> None:
    ids = tokens(tokenizer, f"t<|close|>response<|sep|><|open|>tools<|sep|>{CALL}")
    assert parse(tokenizer, ids, thinking=False) == ChatDelta("", "t", [F])


def test_spelled_markers_are_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|close|>think<|sep|>")
    assert parse(tokenizer, ids) == ChatDelta("<|close|>think<|sep|>")


def test_reserved_ids_do_not_show(tokenizer: Tokenizer) -> None:
    ids = [65, SPECIAL["[EOS]"], 66, VOCAB - 4, SPECIAL["[PAD]"], 67]
    assert parse(tokenizer, ids, thinking=False) == ChatDelta("", "ABC")


@pytest.mark.parametrize(
    ("kind", "body", "json_text"),
    [
        ("string", "1", '"1"'),
        ("string", 'say "hi"\n漢', '"say \\"hi\\"\\n漢"'),
        ("number", "1e2", "1e2"),
        ("number", " 1.50 ", "1.50"),
        ("number", "9" * 5000, "9" * 5000),
        ("boolean", "true", "true"),
        ("null", "null", "null"),
        ("object", '{"b": 1, "a": [ ]}', '{"b": 1, "a": [ ]}'),
        ("number", "many", '"many"'),
        ("number", "NaN", '"NaN"'),
        ("object", '{"b": ', '"{\\"b\\": "'),
        ("", "7", "7"),
        ("array", "[" * 50_000, json.dumps("[" * 50_000)),
    ],
)
def test_argument_values(tokenizer: Tokenizer, kind: str, body: str, json_text: str) -> None:
    text = (
        f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        f'<|open|>argument key="k" type="{kind}"<|sep|>{body}<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
    )
    (call,) = parse(tokenizer, tokens(tokenizer, text)).tool_calls
    assert call.arguments == f'{{"k": {json_text}}}'


def test_attributes_unescape_quotes_then_ampersands(tokenizer: Tokenizer) -> None:
    text = CALL.replace('"f"', '"a&quot;b&amp;quot;"').replace('"x"', '"&amp;amp;"')
    (call,) = parse(tokenizer, tokens(tokenizer, text)).tool_calls
    assert (call.name, call.arguments) == ('a"b&quot;', '{"&amp;": 1}')


@pytest.mark.parametrize(
    ("body", "arguments"), [(' {"a": 1e2} ', '{"a": 1e2}'), ("not json", "not json")]
)
def test_json_elements(tokenizer: Tokenizer, body: str, arguments: str) -> None:
    text = (
        '<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>'
        f"{body}<|close|>json<|sep|><|close|>call<|sep|>"
    )
    (call,) = parse(tokenizer, tokens(tokenizer, text)).tool_calls
    assert call.arguments == arguments


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    """What each id of the text adds to the arguments of the one call, "" left out."""
    parser = ChatParser(tokenizer, thinking=False, **options)
    deltas = [parser.push([token]) for token in tokens(tokenizer, text)]
    return [call.arguments for delta in deltas for call in delta.tool_calls if call.arguments]


def test_calls_stream_as_they_are_written_and_count_up(tokenizer: Tokenizer) -> None:
    parser = ChatParser(tokenizer, thinking=False, call_id=lambda name, index: f"{name}-{index}")
    head, rest = CALL.split("<|open|>argument")
    assert parser.push(tokens(tokenizer, head)).tool_calls == [CallDelta(0, "", "f-0", "f")]
    rest = "<|open|>argument" + rest
    assert parser.push(tokens(tokenizer, rest)).tool_calls == [CallDelta(0, '{"x": 1}')]
    second = CallDelta(1, '{"x": 1}', "f-1", "f")
    assert parser.push(tokens(tokenizer, CALL)).tool_calls == [second]
    assert not parser.finish()


def test_strings_stream_at_once_and_other_values_when_their_type_is_sure(
    tokenizer: Tokenizer,
) -> None:
    head = '<|open|>call tool="f"<|sep|><|open|>argument key="k" type="{}"<|sep|>'
    tail = "<|close|>argument<|sep|><|close|>call<|sep|>"
    text = head.format("string") + 'x"y' + tail
    assert pieces(tokenizer, text) == ['{"k": "', "x", '\\"', "y", '"', "}"]
    text = head.format("number") + "123" + tail
    assert pieces(tokenizer, text) == ['{"k": 123', "}"]
    assert pieces(tokenizer, text, typed=True) == ['{"k": ', "1", "2", "3", "}"]


def test_a_call_that_the_limit_cuts_stays_open(tokenizer: Tokenizer) -> None:
    text = CALL.replace("number", "string").split("<|close|>argument")[0]
    (call,) = parse(tokenizer, tokens(tokenizer, text), thinking=False, cut=True).tool_calls
    assert call.arguments == '{"x": "1'
    (call,) = parse(tokenizer, tokens(tokenizer, text), thinking=False).tool_calls
    assert call.arguments == '{"x": "1"}'


def test_of_what_is_written_twice_the_first_counts(tokenizer: Tokenizer) -> None:
    argument = CALL[CALL.index("<|open|>argument") : CALL.index("<|close|>call")]
    json_element = '<|open|>json type="object"<|sep|> {"y": 2} <|close|>json<|sep|>'

    def arguments(body: str) -> str:
        text = f'<|open|>call tool="f"<|sep|>{body}<|close|>call<|sep|>'
        (call,) = parse(tokenizer, tokens(tokenizer, text)).tool_calls
        return call.arguments

    assert arguments(argument + argument.replace("1", "2")) == '{"x": 1}'
    assert arguments(argument + json_element) == '{"x": 1}'
    assert arguments(json_element + argument) == '{"y": 2}'
    assert arguments(json_element + json_element) == '{"y": 2}'
    assert arguments("") == "{}"


def test_forbidden_calls_are_dropped(tokenizer: Tokenizer) -> None:
    answer = parse(tokenizer, tokens(tokenizer, TURN), tools_allowed=False)
    assert answer == ChatDelta("reasoning", "text")


def test_reasoning_tokens_are_the_ids_inside_think(tokenizer: Tokenizer) -> None:
    parser = ChatParser(tokenizer, thinking=True)
    parser.push(tokens(tokenizer, TURN))
    assert parser.reasoning_tokens == len(tokenizer.encode("reasoning"))


def test_half_a_character_never_streams(tokenizer: Tokenizer) -> None:
    parser = ChatParser(tokenizer, thinking=False)
    wave = "👋".encode()
    assert [parser.push([byte]).content for byte in wave] == ["", "", "", "👋"]
    assert parser.push(list(wave[:3])).content == ""
    assert parser.finish().content == "\ufffd"


def test_an_answer_survives_the_way_back_into_a_prompt(tokenizer: Tokenizer) -> None:
    """render -> parse -> render gives the same ids: a replayed turn hits the same prefix."""
    arguments = '{"city": "Paris\\n\\"x\\"", "n": 1e2, "o": {"b": [1.0, null]}}'
    call = {"id": "functions.f:0", "function": {"name": 'f"&', "arguments": arguments}}
    turn = {"role": "assistant", "reasoning_content": "r", "content": "t 漢", "tool_calls": [call]}

    def render(message: dict[str, Any]) -> list[int]:
        return render_chat([message], None, "max", None, tokenizer, add_generation_prompt=False)

    first = render(turn)
    answer = parse(tokenizer, first[first.index(SPECIAL["<|end_of_msg|>"]) + 1 :])
    again = {"id": "x", "function": {"name": answer.tool_calls[0].name}}
    again["function"]["arguments"] = answer.tool_calls[0].arguments
    replayed = {"role": "assistant", "reasoning": answer.reasoning, "content": answer.content}
    assert render(replayed | {"tool_calls": [again]}) == first


def test_the_48b_has_plain_answers(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path, "kimi_k2")
    ids = [*tokenizer.encode("hello"), special_names(VOCAB, "kimi_k2")["<|im_end|>"]]
    assert parse(tokenizer, ids, thinking=True) == ChatDelta("", "hello")


TAG_WORDS = st.sampled_from(
    ["think", "response", "tools", "message", 'call tool="f"', "call", "argument", "json",
     'argument key="k" type="number"', 'argument key="s" type="string"', "shout", ""]
)  # fmt: skip
KINDS = st.sampled_from(["open", "close"])
PIECES = (
    st.builds(lambda kind, word: f"<|{kind}|>{word}<|sep|>", KINDS, TAG_WORDS)
    | st.sampled_from(MARKERS)
    | st.text(st.sampled_from('ab 1{"é漢'), max_size=5)
)  # fmt: skip
ANSWERS = st.lists(PIECES, max_size=14).map("".join)
NOISE = st.lists(st.integers(0, VOCAB - 1), max_size=4)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


@given(text=ANSWERS, noise=NOISE, at=st.integers(0, 40), sizes=SIZES, thinking=st.booleans())
def test_deltas_sum_to_the_parse_of_the_whole(
    tokenizer: Tokenizer,
    text: str,
    noise: list[int],
    at: int,
    sizes: tuple[int, ...],
    thinking: bool,
) -> None:
    ids = tokens(tokenizer, text)
    ids[at:at] = noise  # half characters and reserved ids
    whole = parse(tokenizer, ids, thinking)
    assert parse(tokenizer, ids, thinking, sizes) == whole
    assert parse(tokenizer, ids, thinking, (1,)) == whole
    for call in whole.tool_calls:
        assert call.name
    assert [call.index for call in whole.tool_calls] == list(range(len(whole.tool_calls)))


@given(
    reasoning=st.text(max_size=8),
    content=st.text(max_size=8),
    values=st.dictionaries(
        st.text(max_size=5),
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.lists(st.integers()),
        max_size=3,
    ),
    sizes=SIZES,
)
def test_what_is_rendered_parses_back(
    tokenizer: Tokenizer,
    reasoning: str,
    content: str,
    values: dict[str, Any],
    sizes: tuple[int, ...],
) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps(values)}}
    turn = {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
        "tool_calls": [call],
    }
    ids = render_chat([turn], None, "low", None, tokenizer, add_generation_prompt=False)
    start = ids.index(SPECIAL["<|end_of_msg|>"]) + 1  # after the thinking-effort message
    answer = parse(tokenizer, ids[start:], sizes=sizes)
    assert answer.reasoning == reasoning.encode("utf-8", "replace").decode()
    assert answer.content == content.encode("utf-8", "replace").decode()
    (parsed,) = answer.tool_calls
    assert json.loads(parsed.arguments) == values
