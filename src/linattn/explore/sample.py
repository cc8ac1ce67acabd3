"""Writes the heads that come with the package: `python -m linattn.explore.sample` (needs linattn[hf], fetches SmolLM2)."""

import json

from ..hf.heads import capture_heads
from ..hf.weights import load
from .page import SAMPLE

TEXT = (
    "The cat sat on the mat and looked at the moon. The moon looked back at the cat on the mat, and the cat said: I am the "
    "cat who sat on the mat. The moon said nothing, for the moon is far and the cat is near."
)
LAYERS = (5, 17)  # heads that look for the same token, and for what followed it last time


def main() -> None:
    model, tokenizer = load("smollm2")
    heads = capture_heads(model, tokenizer, TEXT, LAYERS, name="SmolLM2-135M-Instruct", dtype="float16")
    SAMPLE.write_text(json.dumps(heads, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
