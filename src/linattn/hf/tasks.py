"""Synthetic long-range tasks: a model reads a long text once, and is asked about it at the end.

Every question is asked of the state after the text, so nothing about it is known while reading. A score is the share of the
answers' tokens that the model ranks first, given those before them. Texts are drawn from a seed.
"""

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .fidelity import CHUNK, Choice, new_cache, using

Encode = Callable[[str], Sequence[int]]

NAMES = (  # noqa: SIM905
    "Alder Basil Cedar Dahlia Elm Fern Ginger Hazel Iris Juniper Kale Laurel Maple Nettle Olive Poppy Quince Rowan Sage "
    "Thyme Umber Violet Willow Yarrow Aspen Birch Clover Daisy Heather Ivy Jasmine Lotus Myrtle Oak Peony Rose Tansy"
).split()
PLACES = (  # noqa: SIM905
    "harbour mill library station garden bakery museum tower school market bridge orchard theatre forge inn"
).split()
WORDS = (  # noqa: SIM905
    "river stone lamp copper window letter winter music silver basket candle mirror engine paper garden ladder cotton "
    "hammer island button saddle marble thread wagon pepper violin anchor blanket carpet desert feather glacier"
).split()
_SUBJECTS = ("The baker", "A teacher", "Our neighbour", "The old captain", "Her brother", "The clerk", "A visitor")
_VERBS = ("carried", "repaired", "painted", "forgot", "described", "sold", "measured", "borrowed", "admired", "hid")
_OBJECTS = ("the wooden table", "a pair of boots", "the garden gate", "an old map", "three chairs", "the kettle")
_WHEN = ("before lunch", "in the rain", "last autumn", "without a word", "near the river", "on a quiet morning")


@dataclass(frozen=True)
class Example:
    """One text with its questions. facts: to be placed in the text, in this order; questions: each with its answer."""

    facts: list[str]
    questions: list[tuple[str, str]]


@dataclass(frozen=True)
class Score:
    """Share of the answers' tokens that are ranked first, and half the width of its 95 % interval over texts."""

    first: float
    interval: float
    texts: int


def passkey(r: random.Random) -> Example:
    """One number, told once."""
    key = str(r.randint(10000, 99999))
    return Example([f"The pass key is {key}. Remember it."], [("The pass key is", f" {key}")])


def many_keys(r: random.Random) -> Example:
    """Eight numbers of eight persons."""
    told = {name: str(r.randint(1000, 9999)) for name in r.sample(NAMES, 8)}
    asked = r.sample(sorted(told), 4)
    facts = [f"The locker number of {name} is {key}." for name, key in told.items()]
    return Example(facts, [(f"The locker number of {name} is", f" {told[name]}") for name in asked])


def variables(r: random.Random) -> Example:
    """Chains of assignments: what is the value of the last one?"""
    facts, questions = [], []
    for _ in range(3):
        value, names = str(r.randint(100, 999)), r.sample(WORDS, 3)
        facts += [f"{names[0]} = {value}", f"{names[1]} = {names[0]}", f"{names[2]} = {names[1]}"]
        questions += [(f"{name} = {before} =", f" {value}") for before, name in itertools.pairwise(names)]
    return Example(facts, questions)


def table(r: random.Random) -> Example:
    """Fifteen lines of a key-value table in a row."""
    rows = {f"{place}-{r.randint(10, 99)}": r.choice(WORDS) for place in PLACES}
    text = "\n".join(f'"{key}": "{value}",' for key, value in rows.items())
    asked = r.sample(sorted(rows), 4)
    return Example([f"{{\n{text}\n}}"], [(f'"{key}": "', f"{rows[key]}") for key in asked])


def passage(r: random.Random) -> Example:
    """A sentence of random words, to be repeated from its beginning."""
    words = r.sample(WORDS, 12)
    text = " ".join(words)
    return Example(
        [f"The poem begins: {text}."], [(f"The poem begins: {' '.join(words[:3])}", f" {' '.join(words[3:])}")]
    )


def few_shot(r: random.Random) -> Example:
    """Examples of a made-up mapping from words to classes, far apart."""
    classes = r.sample(NAMES, 3)
    label = {word: classes[i % 3] for i, word in enumerate(r.sample(WORDS, 12))}
    facts = [f"{word} belongs to {name}." for word, name in label.items()]
    return Example(facts, [(f"{word} belongs to", f" {label[word]}") for word in r.sample(sorted(label), 4)])


TASKS: dict[str, Callable[[random.Random], Example]] = {
    "passkey": passkey,
    "many keys": many_keys,
    "variables": variables,
    "table": table,
    "passage": passage,
    "few-shot": few_shot,
}


def filler(r: random.Random) -> str:
    """A sentence about nothing."""
    return f"{r.choice(_SUBJECTS)} {r.choice(_VERBS)} {r.choice(_OBJECTS)} {r.choice(_WHEN)}. "


def write_text(example: Example, r: random.Random, encode: Encode, length: int, start: Sequence[int]) -> list[int]:
    """Tokens of a text: `start` (the model's start token), then sentences about nothing with the facts spread among them."""
    facts = [list(encode(f"\n{fact}\n")) for fact in example.facts]
    room = length - len(start) - sum(map(len, facts))
    if room < 0:
        raise ValueError(f"{length} tokens are too few for this task: its facts alone take {length - room}.")
    words: list[int] = []
    while len(words) < room:
        words += encode("".join(filler(r) for _ in range(40)))
    # One place in each of equal parts of the first nine tenths: the end of the text is near, not far.
    part = room * 0.9 / len(facts)
    places = [int((i + r.random()) * part) for i in range(len(facts))]
    text, done = list(start), 0
    for place, fact in zip(places, facts, strict=True):
        text += words[done:place] + fact
        done = place
    return text + words[done:room]


@torch.inference_mode()
def run_task(
    model: PreTrainedModel,
    encode: Encode,
    task: str,
    choice: Choice,
    *,
    length: int,
    texts: int = 8,
    start: Sequence[int] = (),
) -> Score:
    """Score of one kind of attention on `texts` texts of `length` tokens. The texts depend on their number and length only."""
    shares = []
    with using(model, choice):
        for seed in range(texts):
            r = random.Random(f"{task} {seed}")
            example = TASKS[task](r)
            ids = torch.tensor([write_text(example, r, encode, length, start)])
            cache = new_cache(model, choice)
            for i in range(0, ids.shape[1], CHUNK):
                model(ids[:, i : i + CHUNK], past_key_values=cache, logits_to_keep=1)
            found = []
            for question, answer in example.questions:
                asked, wanted = list(encode(f"\n{question}")), list(encode(answer))
                given = torch.tensor([asked + wanted])
                logits = model(given, past_key_values=copy.deepcopy(cache), logits_to_keep=len(wanted) + 1).logits[0]
                found.append(float((logits[:-1].argmax(-1) == torch.tensor(wanted)).float().mean()))
            shares.append(sum(found) / len(found))
    mean = sum(shares) / len(shares)
    spread = math.sqrt(sum((x - mean) ** 2 for x in shares) / max(1, len(shares) - 1))
    return Score(mean, 1.96 * spread / math.sqrt(len(shares)), len(shares))
