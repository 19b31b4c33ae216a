"""What is asked is in the text, where it is said to be; and the same everywhere."""

import random
import re
from collections import Counter
from itertools import islice

import pytest

from expertmesh.deploy.eval import needles
from expertmesh.deploy.eval.cases import Case, Maker, Probe
from expertmesh.deploy.eval.filler import Noise, Prose, Text
from expertmesh.deploy.eval.tasks import TASKS, make
from expertmesh.deploy.training import wordlists as words

LENGTH = 1024
NEEDLES = ("single", "multikey", "words", "multiquery", "multivalue", "distractors")


def answers(maker: Maker, probe: Probe) -> list[str]:
    return [maker.tokenizer.decode(probe.ids[begin:end]) for begin, end in probe.spans]


def around(maker: Maker, case: Case, depth: float, tokens: int) -> str:
    at = round(depth * len(case.context))
    return maker.tokenizer.decode(case.context[at : at + tokens])


@pytest.mark.parametrize("task", TASKS)
def test_a_case_depends_on_its_seed_and_number_alone(maker: Maker, task: str) -> None:
    case = make(task, maker, LENGTH, 3, 7)
    assert case == make(task, maker, LENGTH, 3, 7)
    assert case != make(task, maker, LENGTH, 4, 7) and case != make(task, maker, LENGTH, 3, 8)


@pytest.mark.parametrize("length", [256, 1024, 4096])
@pytest.mark.parametrize("task", TASKS)
def test_the_text_has_its_length_and_answers_are_parts_of_what_is_asked(
    maker: Maker, task: str, length: int
) -> None:
    case = make(task, maker, length, 0, 0)
    # A haystack cannot be shorter than its facts; a chat has its turns around the text.
    assert length - 64 <= len(case.context) <= length + 256
    assert case.probes
    for probe in case.probes:
        assert 0 <= probe.depth <= 1 and probe.spans
        for begin, end in probe.spans:
            assert 0 < begin < end <= len(probe.ids)
        assert max(probe.ids) < maker.tokenizer.vocab_size


@pytest.mark.parametrize("task", NEEDLES)
def test_a_fact_stands_at_the_depth_that_is_reported(maker: Maker, task: str) -> None:
    for number in range(4):
        case = make(task, maker, LENGTH, number, 0)
        text = maker.tokenizer.decode(case.context)
        for probe in case.probes:
            for value in answers(maker, probe):
                assert f" is{value}." in text
            if (
                task != "multiquery"
            ):  # whose depth is that of the first fact, whoever is asked first
                assert f" is{answers(maker, probe)[0]}." in around(maker, case, probe.depth, 40)


def test_other_facts_are_about_other_names_and_of_other_forms() -> None:
    told = needles.facts(random.Random(0), 5)
    assert len({fact.name for fact in told}) == len({fact.form for fact in told}) == 5
    assert len({fact.name for fact in needles.facts(random.Random(0), 8)}) == 8


def test_every_key_that_is_asked_is_in_the_table_with_its_value(maker: Maker) -> None:
    case = make("mqar", maker, LENGTH, 0, 0)
    rows = dict(re.findall(r"(.+): (\d\d)\n", maker.tokenizer.decode(case.context)))
    for probe in case.probes:
        key = maker.tokenizer.decode(probe.ids).partition("?")[0]
        assert f" {rows[key]}" == answers(maker, probe)[0]


def test_keys_near_the_end_are_asked_more_often_and_far_ones_too(maker: Maker) -> None:
    depths = [p.depth for n in range(40) for p in make("mqar", maker, LENGTH, n, 0).probes]
    assert sum(d > 0.5 for d in depths) > 2 * sum(d <= 0.5 for d in depths) > 0


def test_a_chain_leads_from_the_name_that_is_asked_to_the_value(maker: Maker) -> None:
    case = make("tracing", maker, LENGTH, 0, 0)
    lines = re.findall(r"\n(\w) = (\w+)\n", maker.tokenizer.decode(case.context))
    sources = dict(lines)
    assert len(sources) == len(lines) == 2 + 3 + 4 + 5
    hops = []
    for probe in case.probes:
        name = re.findall(r"value of (\w) is", maker.tokenizer.decode(probe.ids))[0]
        steps = 0
        while name in sources:
            name, steps = sources[name], steps + 1
        assert f" {name}" == answers(maker, probe)[0]
        hops.append(steps - 1)
    assert sorted(hops) == [1, 2, 3, 4]


def test_the_most_frequent_word_is_the_one_that_is_wanted(maker: Maker) -> None:
    case = make("frequent", maker, LENGTH, 0, 0)
    listed = maker.tokenizer.decode(case.context).partition("\n\n")[0].split()
    (probe,) = case.probes
    (best, _), *_ = Counter(listed).most_common()
    begin, end = probe.spans[0]
    assert end - begin == 1
    assert probe.ids[begin] == maker.tokenizer.encode(f" {best}")[0] == probe.choices[0]
    assert len(set(probe.choices)) == len(probe.choices)


def test_what_a_chat_must_keep_is_said_in_its_first_turn(maker: Maker) -> None:
    case = make("kept", maker, LENGTH, 0, 0)
    (value,) = answers(maker, case.probes[0])
    assert f" is{value}." in maker.tokenizer.decode(case.context[:60])
    assert value not in maker.tokenizer.decode(case.context[80:])


def test_passages_return_with_their_first_words(maker: Maker) -> None:
    case = make("returning", maker, LENGTH, 0, 0)
    text = maker.tokenizer.decode(case.context)
    assert len(case.probes) == text.count("Copy this: ") == 4
    for probe in case.probes:
        passage = maker.tokenizer.decode(probe.ids).partition("Copy: ")[2]
        assert len(passage.split()) == 16 and f"Copy this: {passage}\n" in text
        assert len(answers(maker, probe)[0].split()) == 12


def test_filler_names_nobody_whom_a_fact_could_be_about() -> None:
    text = "".join(islice(Prose().sentences(random.Random(0)), 2000))
    assert not set(re.findall(r"[A-Z]\w+", text)) & set(words.NAMES + words.CITIES)


def test_a_given_text_is_read_round_and_round_from_a_drawn_place() -> None:
    filler = Text("One. Two! Three?\nFour\nFive.")
    read = "".join(islice(filler.sentences(random.Random(1)), 10))
    assert all(read.count(word) == 2 for word in ("One.", "Two!", "Three?", "Four", "Five."))
    starts = {next(filler.sentences(random.Random(seed))) for seed in range(40)}
    assert len(starts) == 5
    with pytest.raises(ValueError, match="no sentence"):
        Text(" \n ")


def test_noise_is_the_same_few_sentences() -> None:
    said = list(islice(Noise().sentences(random.Random(0)), 20))
    assert len(set(said)) == 5
