"""Chat documents in K3's XTML format."""

from __future__ import annotations

import random

import tiktoken

from expertmesh.deploy.training import chat_data as data
from expertmesh.deploy.training import tasks
from expertmesh.deploy.training import wordlists as words
from expertmesh.deploy.training.tasks import Doc, Filler

SAY = 3.0
FIRST = 6.0  # the first two tokens decide which answer is given
MARK = 0.3  # closing tags: always the same, but they must be right
GIVEN = 0.05


def tag(doc: Doc, name: str, weight: float = GIVEN, **attributes: str) -> Doc:
    """`<|open|>NAME key="value"<|sep|>`, every piece encoded on its own."""
    doc.special("<|open|>", weight).text(name, weight)
    for key, value in attributes.items():
        doc.text(f" {key}", weight).text('="', weight).text(value, weight).text('"', weight)
    return doc.special("<|sep|>", weight)


def end(doc: Doc, name: str, weight: float = GIVEN) -> Doc:
    return doc.special("<|close|>", weight).text(name, weight).special("<|sep|>", weight)


def message(doc: Doc, role: str, body: str) -> Doc:
    tag(doc, "message", role=role).text(body)
    return end(doc, "message").special("<|end_of_msg|>")


def reply(doc: Doc, body: str, thought: str | None = None) -> Doc:
    """An assistant turn; `thought` None means thinking is off."""
    tag(doc, "message", role="assistant")
    if thought is not None:
        tag(doc, "think").text(thought, MARK)
        end(doc, "think", MARK)
    tag(doc, "response", GIVEN if thought is None else MARK)
    ids = doc.encoding.encode_ordinary(body)
    doc.tokens(ids[:2], FIRST).tokens(ids[2:], SAY)
    # leaving the answer at the right place is part of the answer
    doc.special("<|close|>", SAY).text("response", MARK).special("<|sep|>", MARK)
    return end(doc, "message", MARK).special("<|end_of_msg|>", MARK)


def effort(doc: Doc, level: str) -> None:
    """The system message of thinking mode: fixed wording, so nothing to learn from it."""
    tag(doc, "message", GIVEN, role="system", type="thinking-effort")
    doc.text(data.EFFORT.format(level), GIVEN)
    end(doc, "message", GIVEN).special("<|end_of_msg|>", GIVEN)


def small_talk(rng: random.Random) -> tuple[str, str]:
    # what can be asked in many ways is asked often
    ways = [len(asks) for asks, _ in data.SMALL_TALK]
    asks, answers = rng.choices(data.SMALL_TALK, ways)[0]
    return rng.choice(asks), rng.choice(answers)


def fact(rng: random.Random) -> tuple[str, str]:
    """Capitals, opposites, colours, calendar, small sums, and what the model cannot know."""
    kind = rng.randrange(8)
    if kind == 0:
        country, city = rng.choice(list(data.CAPITALS.items()))
        ask = rng.choice(("What is the capital of {}?", "Which city is the capital of {}?",
                          "Name the capital of {}.", "what is the capital of {}?"))  # fmt: skip
        return ask.format(country), f"The capital of {country} is {city}."
    if kind == 1:
        word, other = rng.choice(list(data.OPPOSITES.items()))
        if rng.random() < 0.5:
            word, other = other, word
        ask = rng.choice(("What is the opposite of {}?", "Tell me the opposite of {}.",
                          "Opposite of {}?"))  # fmt: skip
        return ask.format(word), f"The opposite of {word} is {other}."
    if kind == 2:
        thing, colour = rng.choice(list(data.COLOURS.items()))
        ask = rng.choice(("What colour is {}?", "What is the colour of {}?", "What color is {}?"))
        return ask.format(thing), f"The colour of {thing} is {colour}."
    if kind == 3:
        cycle, unit = rng.choice(((data.DAYS, "day"), (data.MONTHS, "month")))
        i, after = rng.randrange(len(cycle)), rng.random() < 0.7
        other = cycle[(i + (1 if after else -1)) % len(cycle)]
        side = "after" if after else "before"
        return (
            f"What {unit} comes {side} {cycle[i]}?",
            f"The {unit} {side} {cycle[i]} is {other}.",
        )
    if kind == 4:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        ask = rng.choice(("What is {} plus {}?", "What is {} + {}?", "{} + {} = ?", "{} + {}"))
        if rng.random() < 0.3:
            a, b = data.NUMBERS[a], data.NUMBERS[b]  # type: ignore[assignment]
            total = data.NUMBERS[data.NUMBERS.index(str(a)) + data.NUMBERS.index(str(b))]
            return f"What is {a} plus {b}?", f"{str(a).capitalize()} plus {b} is {total}."
        return ask.format(a, b), f"{a} plus {b} is {a + b}."
    if kind == 5:
        start = rng.randint(1, 5)
        stop = start + rng.randint(3, 6)
        listed = ", ".join(str(i) for i in range(start, stop + 1))
        return f"Count from {start} to {stop}.", f"{listed}."
    if kind == 6:
        which = rng.choice((("days of the week", data.DAYS), ("months of the year", data.MONTHS)))
        ask = rng.choice(("Name the {}.", "What are the {}?", "List the {}."))
        return ask.format(which[0]), ", ".join(which[1]) + "."
    return rng.choice(data.UNKNOWN), data.DO_NOT_KNOW


def story(rng: random.Random) -> tuple[str, str]:
    """One to three sentences of drawing-room prose about a topic."""
    topic = rng.choice(data.TOPICS)
    slots = {
        "t": topic, "n": rng.choice(data.WOMEN), "m": rng.choice(data.MEN),
        "s": rng.choice(data.SEASONS), "p": rng.choice(data.PLACES),
    }  # fmt: skip
    parts = [rng.choice(data.OPENINGS), rng.choice(data.MIDDLES), rng.choice(data.ENDINGS)]
    body = " ".join(parts[: rng.choice((2, 3, 3))]).format(**slots)
    return rng.choice(data.STORY_ASKS).format(**slots), body


def echo(rng: random.Random) -> tuple[str, str]:
    pool = words.NOUNS + words.ADJECTIVES
    said = " ".join(rng.choice(pool) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.3:
        said = rng.choice(data.ENDINGS + data.SYSTEM)
    ask = rng.choice(("Repeat after me: {}", "Say: {}", "Repeat: {}", "Please repeat: {}",
                      "Say {}", "Copy this: {}"))  # fmt: skip
    return ask.format(said), said


def memory(rng: random.Random) -> list[tuple[str, str]]:
    """Two turns: something told, then asked."""
    kind = rng.randrange(3)
    name = rng.choice(words.NAMES)
    if kind == 0:
        told = rng.choice(("My name is {}.", "I am {}.", "Hello, my name is {}.", "Call me {}."))
        ask = rng.choice(("What is my name?", "Who am I?", "Do you remember my name?"))
        return [(told.format(name), f"Nice to meet you, {name}."), (ask, f"Your name is {name}.")]
    if kind == 1:
        thing = rng.choice(("colour", "animal", "fruit", "word", "number", "book"))
        value = rng.choice(words.NOUNS + words.ADJECTIVES)
        return [
            (f"My favourite {thing} is {value}.", "I will remember that."),
            (f"What is my favourite {thing}?", f"Your favourite {thing} is {value}."),
        ]
    statement, question, answer = tasks.needle_facts(rng, 1)[0]
    return [(statement, "I will remember that."), (question, answer)]


def hidden(
    enc: tiktoken.Encoding, rng: random.Random, length: int, filler: Filler
) -> tuple[str, str]:
    """A needle inside a long user message."""
    statement, question, answer = tasks.needle_facts(rng, 1)[0]
    text = enc.decode(filler(rng, max(20, length - 130)), errors="ignore")
    cut = int(len(text) * rng.random())
    return f"{text[:cut]}\n\n{statement}\n\n{text[cut:]}\n\n{question}", answer


def conversation(enc: tiktoken.Encoding, rng: random.Random, length: int, filler: Filler) -> Doc:
    """As many turns as fit, sometimes under a system message, with or without thinking."""
    doc = Doc(enc)
    thinking = length >= 256 and rng.random() < 0.75
    if thinking:
        effort(doc, rng.choice(("high", "max", "max", "low")))
    if rng.random() < 0.25:
        message(doc, "system", rng.choice(data.SYSTEM))
    most = (length - (130 if thinking else 0)) // 45
    turns: list[tuple[str, str]] = []
    if length >= 256 and rng.random() < 0.1:
        turns.append(hidden(enc, rng, length, filler))
        most = 0
    while len(turns) < most:
        if rng.random() < 0.2:
            pair = memory(rng)
            if rng.random() < 0.4:
                pair.insert(1, small_talk(rng))
            turns += pair
        else:
            make = rng.choices((small_talk, fact, story, echo), (0.35, 0.33, 0.12, 0.2))[0]
            turns.append(make(rng))
    for question, answer in turns:
        if len(doc.ids) > length - 60 and doc.weights[-1] == MARK:
            break
        message(doc, "user", question)
        thought = rng.choice(("", "", "", rng.choice(data.THOUGHTS))) if thinking else None
        reply(doc, answer, thought)
    return doc
