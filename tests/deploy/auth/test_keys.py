"""Keys files: what is read, and that no error repeats what stands in one."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.deploy.auth.keys import (
    ApiKey,
    KeysError,
    check_key,
    file_line,
    hash_key,
    new_key,
    parse_keys,
)

A, B = hash_key("a"), hash_key("b")
CANARY = "em-canary-3f9ab71c"


def test_both_forms_say_the_same() -> None:
    lines = f"""
# the team's keys
{{"name": "a", "hash": "{A}"}}
{{"name": "b", "hash": "{B}", "requests_per_minute": 60, "expires": "2027-01-31T12:00:00Z"}}
"""
    listed = f"""
- name: a
  hash: {A}
- {{name: b, hash: "{B}", requests_per_minute: 60, expires: 2027-01-31 12:00:00}}
"""
    named = "keys:\n" + listed
    array = f'[{{"name": "a", "hash": "{A}"}},\n {{"name": "b", "hash": "{B}", ' + (
        '"requests_per_minute": 60, "expires": "2027-01-31T13:00:00+01:00"}]'
    )
    a = ApiKey(name="a", hash=A)
    b = ApiKey(
        name="b", hash=B, requests_per_minute=60, expires=datetime(2027, 1, 31, 12, tzinfo=UTC)
    )
    for text in (lines, listed, named, array):
        assert parse_keys(text.encode()) == (a, b), text


def test_a_key_ends_at_midnight_of_its_day_or_when_it_is_disabled() -> None:
    text = f"- {{name: a, hash: '{A}', expires: 2027-01-31}}"
    (key,) = parse_keys(text.encode())
    assert key.usable(datetime(2027, 1, 30, 23, 59, tzinfo=UTC))
    assert not key.usable(datetime(2027, 1, 31, tzinfo=UTC))
    assert not ApiKey(name="a", hash=A, disabled=True).usable(datetime(2000, 1, 1, tzinfo=UTC))


def entry(**fields: Any) -> str:
    items = {"name": "a", "hash": f"'{A}'"} | fields
    return "- {" + ", ".join(f"{name}: {value}" for name, value in items.items()) + "}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no keys"),
        ("keys: []", "no keys"),
        ("# nothing yet\n", "no keys"),
        (CANARY, "must be a list"),
        (f"{CANARY}: team", "must be a list"),
        (f"- {CANARY}", "key 1: must have name and hash"),
        (entry(hash=CANARY), "key 1: hash: must be sha256:"),
        (entry(hash=A.upper()), "key 1: hash: must be sha256:"),
        ("- {name: a}", "key 1: hash"),
        (entry(name=f"'{CANARY} '"), "key 1: name"),
        (entry(key=CANARY), "key 1: an unknown field; known are name, hash,"),
        (f"- {{{CANARY}: 1}}", "key 1: an unknown field"),
        (entry() + "\n- {1: 2}", "key 2: an unknown field"),
        (entry(requests_per_minute=0), "key 1: requests_per_minute"),
        (entry(requests_in_flight="'5'"), "key 1: requests_in_flight"),
        (entry(tokens_per_minute="true"), "key 1: tokens_per_minute"),
        (entry(priority="1.5"), "key 1: priority"),
        (entry(disabled="1"), "key 1: disabled"),
        (entry(expires=CANARY), "key 1: expires: must be a date"),
        (entry(expires="12"), "key 1: expires: must be a date"),
        (entry(expires="2027-02-31"), "not YAML"),
        (entry() + "\n" + entry(name="b"), "key 2: another key has the same hash"),
        (entry() + "\n" + entry(hash=f"'{B}'"), "key 2: another key has the same name"),
        (f"- a: [{CANARY}\n", "neither JSON lines nor YAML at line"),
        (f"- !{CANARY} x", "neither JSON lines nor YAML at line 1"),
        (f'{{"name": "a", "hash": "{A}"}}\n{{"hash": {CANARY}}}', "line 2 is not JSON"),
        (f'{{"name": "a", "hash": "{CANARY}"}}', "line 1: hash"),
        (f'{{"name": "a", "hash": "{A}"}}\n\n{{"x": "{CANARY}"}}', "line 3: an unknown"),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_never_the_value(text: str, said: str) -> None:
    with pytest.raises(KeysError) as raised:
        parse_keys(text.encode())
    assert said in str(raised.value)
    trace = f"{raised.value!r} {raised.value.__cause__!r}"
    assert "canary" not in str(raised.value) + trace


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8")))
def test_any_file_is_keys_or_an_error(data: bytes) -> None:
    with pytest.raises(KeysError):
        parse_keys(data)


def test_a_key_shows_only_its_hash_and_not_even_that_in_a_log() -> None:
    key = ApiKey(name="a", hash=hash_key(CANARY))
    assert CANARY not in repr(key) and key.hash not in repr(key) and key.hash not in str(key)
    with pytest.raises(ValueError, match="hash") as raised:
        ApiKey(name="a", hash=CANARY)
    assert "canary" not in str(raised.value)


def test_new_keys_differ_and_fit_into_a_header() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(check_key(key, "it") == key and len(key) > 40 for key in keys)


@pytest.mark.parametrize("bad", ["", "  ", "two words", "naïve", "tab\tbed", "a\nb", "\x7f"])
def test_keys_that_no_header_carries_are_refused(bad: str) -> None:
    with pytest.raises(KeysError, match="printable ASCII"):
        check_key(bad, "it")


def test_the_printed_line_is_an_entry_of_both_forms() -> None:
    line = file_line("a", A)
    assert (
        parse_keys(line.encode()) == parse_keys(f"- {line}".encode()) == (ApiKey(name="a", hash=A),)
    )
    with pytest.raises(KeysError, match="name"):
        file_line("two words", A)
