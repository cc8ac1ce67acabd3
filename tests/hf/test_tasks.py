"""The synthetic tasks: a model that looks things up solves them, one that forgets the past does not."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from hf_support import build
from linattn.cli.fidelity_tasks import RULES, tasks_table
from linattn.hf import tasks, weights
from linattn.hf.baselines import NAMES, baselines_for
from linattn.nearfar import NearFar

KEY = 6  # tokens that the model below looks for


def encode(text):
    return [ord(x) % 128 for x in text]


class LooksUp:
    """Predicts what followed the last tokens where they were seen before; it sees only the last `reach` tokens."""

    def __init__(self, reach):
        self.reach = reach

    def __call__(self, ids, past_key_values, logits_to_keep):
        seen = past_key_values
        rows = []
        for token in ids[0].tolist():
            seen.append(token)
            past = seen[-self.reach :]
            suffix, guess = past[-KEY:], 0
            for i in range(len(past) - KEY - 1, -1, -1):
                if past[i : i + KEY] == suffix:
                    guess = past[i + KEY]
                    break
            rows.append(torch.nn.functional.one_hot(torch.tensor(guess), 128).float())
        return SimpleNamespace(logits=torch.stack(rows)[-logits_to_keep:].unsqueeze(0))


@pytest.mark.parametrize("task", ["passkey", "many keys", "passage", "table"])
def test_who_looks_things_up_finds_them_and_who_forgets_does_not(task, monkeypatch):
    monkeypatch.setattr(tasks, "new_cache", lambda model, choice: [])
    scores = [
        tasks.run_task(LooksUp(reach), encode, task, None, length=900, texts=3, start=[1]) for reach in (10**6, 60)
    ]
    assert scores[0].first > 0.9
    assert scores[1].first < 0.4
    assert all(score.texts == 3 and 0 <= score.interval < 1 for score in scores)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_texts_hold_their_facts_far_from_the_end_and_never_change(task):
    written = []
    for _ in range(2):
        r = random.Random(f"{task} 0")
        example = tasks.TASKS[task](r)
        written.append(tasks.write_text(example, r, encode, 1500, [1]))
    assert written[0] == written[1]
    assert len(written[0]) == 1500
    text = "".join(map(chr, written[0]))
    for fact in example.facts:
        assert fact in text[:1450]
    assert all(answer.strip() in text for _, answer in example.questions)
    with pytest.raises(ValueError, match="too few"):
        tasks.write_text(example, r, encode, 20, [])


def test_baselines_have_the_memory_of_near_far_at_its_peak():
    model, kernel = build("llama"), NearFar(window=16, slots=24, sinks=2, block=8)
    found = baselines_for(model, [], kernel, 24)
    assert list(NAMES) == RULES == [*found, "duo"]  # which needs a calibration
    keys = found["h2o"][0].budget + kernel.block
    assert keys * 2 * 8 * 4 <= kernel.state_bytes(24, 8, 8, 2) < (keys + 1) * 2 * 8 * 4
    rows = [{"task": t, "attention": a, "first": 0.5, "interval": 0.1} for t in ("x", "y") for a in ("exact", "h2o")]
    assert tasks_table(rows)[2] == ["h2o", "0.50 ±0.10", "0.50 ±0.10"]


def test_a_missing_start_token_is_reported_only_where_it_matters(capsys):
    """A tiny model whose embedding of the start token makes the next logits right, in place of a real one."""

    class Tokenizer:
        def __call__(self, text, **options):
            return SimpleNamespace(input_ids=encode(text))

    class Model:
        device = "cpu"
        config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(bos_token_id=2))

        def __init__(self, needs):
            self.needs = needs

        def __call__(self, ids):
            right = ids[0, 0] == 2 or not self.needs
            following = torch.nn.functional.one_hot(torch.roll(ids, -1, 1), 128).float()
            return SimpleNamespace(logits=20 * following if right else -20 * following)

    assert weights.warn_of_missing_start(Model(True), Tokenizer())
    assert "needs its start token (2)" in capsys.readouterr().err
    assert not weights.warn_of_missing_start(Model(False), Tokenizer())
