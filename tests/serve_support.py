"""Tiny models, services and server processes for the tests of the server."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from linattn import hf
from linattn.serve.jobs import Delta, Failed, Finished, Progress
from linattn.serve.limits import Limits
from linattn.serve.model import ModelChoice, ServedModel
from linattn.serve.prompts import Prompt
from linattn.serve.sampling import SamplingOptions
from linattn.serve.schedule import Schedule
from linattn.serve.service import Service

SPECIAL = ["<|end|>", "<|start|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=24, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=258, n_positions=4096, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SIZES,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=0,
        mlp_only_layers=[0, 1],
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=258,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=16,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16
    ),
}
KERNEL = {"window": 16, "slots": 12, "sinks": 2, "block": 8}


def tokenizer():
    """Bytes, two special tokens, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[0])
    found.chat_template = TEMPLATE
    return found


def spaced_tokenizer():
    """As Llama 2's: words with the space before them, bytes as <0xE9>, a token that begins every text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁world"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<s>", "</s>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def build(family="llama", dtype=torch.float64, **changes):
    torch.manual_seed(0)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():  # random weights attend almost evenly and repeat themselves; make them care
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(8)
    return model


def save_tiny(folder: Path) -> Path:
    build(dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def served(family="llama", kernel="softmax", dtype=torch.float64, **options):
    model = build(family, dtype)
    if kernel == "nearfar":
        from linattn import NearFar

        hf.attach(model, NearFar(**KERNEL))
    elif kernel == "attached":
        hf.attach(model)
    return ServedModel(model, tokenizer(), ModelChoice("tiny", kernel), **options)


def service(model=None, *, piece=32, every=64, rows=16, folder=None, memory=2**30, limits=None, **options):
    model = model or served()
    limits = limits or Limits(max_tokens=64, max_concurrent=rows, context=model.context)
    return Service(
        model, limits, schedule=Schedule(piece, every, rows), folder=folder, memory=memory, disk=2**30, **options
    )


def text_of(seed: int, length: int) -> str:
    """Characters that look random and repeat a little."""
    generator = torch.Generator().manual_seed(seed)
    words = [
        "".join(chr(97 + int(i)) for i in torch.randint(26, (5,), generator=generator)) for _ in range(length // 6 + 1)
    ]
    return " ".join(words)[:length]


class Result:
    """What a job gave: texts, tokens and log-probabilities of its answers."""

    def __init__(self):
        self.texts, self.scores, self.finish, self.cached, self.snapshot = {}, {}, {}, 0, None


async def run_job(made: Service, prompt, answers=1, **options):
    """Runs one prompt (text or Prompt) to its end."""
    prompt = made.prompts.text(prompt) if isinstance(prompt, str) else prompt
    options = SamplingOptions(**{"max_tokens": 12, "temperature": 0.0, "top_logprobs": 0, **options})
    result = Result()
    async for _, event in made.run([prompt], options, answers):
        if isinstance(event, Delta):
            result.texts[event.index] = result.texts.get(event.index, "") + event.text
            result.scores.setdefault(event.index, []).extend((c.token, c.logprob) for c in event.choices)
            result.finish[event.index] = event.finish
        elif isinstance(event, Progress):
            result.cached = event.cached
        elif isinstance(event, Finished):
            result.snapshot = event.snapshot
        else:
            assert not isinstance(event, Failed)
    return result


def run_all(made: Service, *jobs):
    """Starts a service, runs coroutine functions of it together, and stops it."""

    async def main():
        return await asyncio.gather(*(job(made) for job in jobs))

    made.start()
    try:
        return asyncio.run(main())
    finally:
        made.stop()


def naive(model: ServedModel, tokens, count):
    """Greedy decoding by whole forward passes without any cache: the readable twin."""
    tokens, found = list(tokens), []
    with torch.inference_mode():
        for _ in range(count):
            logits = model.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            token = int(logits.argmax())
            found.append((token, float(logits.log_softmax(-1)[token])))
            if token in model.eos:
                break
            tokens.append(token)
    return found


class ServerProcess:
    """`linattn serve` in a process of its own, on a free port."""

    def __init__(self, *words: str):
        command = [sys.executable, "-m", "linattn", "serve", "--port", "0", "--threads", "1", *map(str, words)]
        self.command = command
        self.start()

    def start(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        self.url = ""
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()
        end = time.monotonic() + 300
        while not self.url and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert self.url, f"the server did not start: {self.lines}"

    def _follow(self):
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line)
                if found := re.search(r"at (http://\S+)", line):
                    self.url = found[1]

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._follower.join()

    def stop(self):
        self.process.terminate()
        self.process.wait(60)
        self._follower.join()


def prompt_of(tokens) -> Prompt:
    return Prompt(list(tokens))
