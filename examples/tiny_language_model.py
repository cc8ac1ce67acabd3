"""A complete language model with linear attention: trained on text files, then generating with a state of constant size.

    python examples/tiny_language_model.py                        trains on this project's documentation, a few minutes
    python examples/tiny_language_model.py --steps 2000 my.txt    on your own text

Characters in, characters out. There are no position embeddings: a learned gate sets the decay of every head, so the
model can generate far beyond the length it was trained on.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linattn


class Attention(nn.Module):
    """Gated linear self-attention; `state` holds everything before x."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(dim, 3 * dim + heads)
        self.out = nn.Linear(dim, dim)
        nn.init.constant_(self.project.bias[3 * dim :], 4.0)  # gates start near 1: remember about fifty tokens

    def forward(self, x: Tensor, state: linattn.State | None = None) -> tuple[Tensor, linattn.State]:
        B, N, dim = x.shape
        projected, gate = self.project(x).split([3 * dim, self.heads], -1)
        q, k, v = projected.view(B, N, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)  # each (B, H, N, D)
        gate = gate.sigmoid().clamp(1e-4, 1 - 1e-4).mT  # (B, H, N)
        out, state = linattn.attention(q, k, v, kernel="elu", is_causal=True, gate=gate, state=state, return_state=True)
        return self.out(out.transpose(1, 2).reshape(B, N, dim)), state


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, state: linattn.State | None = None) -> tuple[Tensor, linattn.State]:
        attended, state = self.attention(self.norm1(x), state)
        x = x + attended
        return x + self.mlp(self.norm2(x)), state


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, dim: int = 128, heads: int = 4, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, tokens: Tensor, states: list | None = None
    ) -> tuple[Tensor, list]:  # (B, N) -> (B, N, vocabulary)
        x, new_states = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i])
            new_states.append(state)
        return self.norm(x) @ self.embed.weight.T / x.shape[-1] ** 0.5, new_states

    @torch.no_grad()
    def write(self, prompt: Tensor, length: int, temperature: float = 0.7, seed: int = 0) -> Tensor:
        """Reads the prompt in one call, then writes one token at a time; every step costs the same."""
        generator = torch.Generator().manual_seed(seed)
        logits, states = self(prompt[None])
        written = []
        for _ in range(length):
            token = torch.multinomial((logits[0, -1] / temperature).softmax(-1), 1, generator=generator)
            written.append(token)
            logits, states = self(token[None], states)
        return torch.cat(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256, help="characters of a training sequence")
    parser.add_argument("--write", type=int, default=400, help="characters to write afterwards")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    root = Path(__file__).parent.parent
    files = args.files or [
        root / "README.md",
        *sorted((root / "docs").glob("*.md")),
        *sorted(root.glob("src/linattn/*/*.py")),
    ]
    text = "\n".join(path.read_text() for path in files)
    if len(text) <= args.length + 1:
        raise SystemExit(
            f"{len(text)} characters are too few for sequences of {args.length}: pass more text or --length."
        )
    characters = sorted(set(text))
    data = torch.tensor([characters.index(c) for c in text])

    torch.manual_seed(args.seed)
    model = LanguageModel(len(characters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    print(f"{len(text)} characters, {len(characters)} different; {sum(p.numel() for p in model.parameters())} weights")
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        at = torch.randint(len(data) - args.length - 1, (16, 1))
        batch = data[at + torch.arange(args.length + 1)]  # (16, length + 1)
        logits, _ = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            print(
                f"step {step:5}  loss {loss.item():.3f} nats a character  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    prompt = data[:64]
    written = model.write(prompt, args.write)
    print("".join(characters[i] for i in prompt), end="|")
    print("".join(characters[i] for i in written))


if __name__ == "__main__":
    main()
