"""Small models and batches for the tests of the summarizer."""

import torch

from linattn_lab.summarize.model import CONFIGS, START, ModelConfig, Seq2Seq

VOCABULARY = 60


def make(kernel="elu", seed=0, **options):
    torch.manual_seed(seed)
    return Seq2Seq(ModelConfig(vocabulary=VOCABULARY, kernel=kernel, **CONFIGS["tiny"] | options)).eval()


def batch(documents=3, source=19, target=9, seed=1):
    generator = torch.Generator().manual_seed(seed)
    document = torch.randint(3, VOCABULARY, (documents, source), generator=generator)
    summary = torch.randint(3, VOCABULARY, (documents, target), generator=generator)
    summary[0, :5] = document[0, 3:8]  # something to copy
    return document, torch.cat([torch.full((documents, 1), START), summary[:, :-1]], 1), summary


def step_by_step(model, source, given):
    """log p (B, T, V), one token at a time."""
    writing, said = model.start(model.encode(source)), []
    for token in given.unbind(1):
        step, writing = model.step(token, writing)
        said.append(step.log_probs)
    return torch.stack(said, 1)
