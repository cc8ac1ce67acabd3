"""Needles: facts placed at different depths of a long text, each asked for at its end."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .fidelity import CHUNK, Choice, new_cache, using

# Each fact, and its answer when the first part is repeated.
FACTS = (
    ("The secret code of the old harbour is", " 7 3 9 1 4"),
    ("The name of the lighthouse keeper's dog is", " Bartholomew Quill"),
    ("The violin that was stolen in Trieste belonged to", " Professor Adelheid Zimmermann"),
    ("The train to Kalmar always leaves from platform", " 48 at 6:35 in the evening"),
    ("Under the green roof of the mill they found", " eleven copper kettles and a parrot"),
)


@dataclass
class Needles:
    """How well the facts were found, averaged over facts.

    Attributes:
        first: share of the answers' tokens that the model ranks first.
        log_likelihood: of a token of an answer.
        rank: geometric mean of the rank of a token of an answer; 1 is best.
    """

    first: float
    log_likelihood: float
    rank: float


@torch.inference_mode()
def find_needles(
    model: PreTrainedModel,
    encode: Callable[[str], Sequence[int]],
    filler: Tensor,
    choice: Choice,
    *,
    length: int,
    turn: int = 0,
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
) -> Needles:
    """Reads `length` tokens of a text (1, tokens) with all facts in it, one at each depth, and asks for each from there.

    turn: the first fact is placed at the depth of this number, so that other texts may have them in other places.
    """
    told = [list(encode(f"\n{opening}{answer}.\n")) for opening, answer in FACTS]
    words = filler[0, : length - sum(map(len, told))].tolist()
    places = sorted((int(depths[(i + turn) % len(depths)] * len(words)), i) for i in range(len(FACTS)))
    text, start = [], 0
    for place, i in places:
        text += words[start:place] + told[i]
        start = place
    ids = torch.tensor([text + words[start:]])
    predicted, answers = [], []
    with using(model, choice):
        cache = new_cache(model, choice)
        for i in range(0, ids.shape[1], CHUNK):
            model(ids[:, i : i + CHUNK], past_key_values=cache, logits_to_keep=1)
        for opening, answer in FACTS:
            question, wanted = list(encode(f"\n{opening}")), list(encode(answer))
            asked = torch.tensor([question + wanted])
            logits = model(asked, past_key_values=copy.deepcopy(cache), logits_to_keep=len(wanted) + 1).logits[0]
            predicted.append(logits[:-1].float().log_softmax(-1))
            answers.append(torch.tensor(wanted).unsqueeze(1))
    found = [row.gather(1, answer) for row, answer in zip(predicted, answers, strict=False)]
    ranks = [(row > likelihood).sum(1) + 1 for row, likelihood in zip(predicted, found, strict=False)]

    def mean(parts: list[Tensor]) -> float:
        return float(torch.stack([part.float().mean() for part in parts]).mean())

    rank = math.exp(mean([rank.log() for rank in ranks]))
    return Needles(mean([rank == 1 for rank in ranks]), mean(found), rank)
