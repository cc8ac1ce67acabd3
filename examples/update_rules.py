"""One small language model for each update rule, trained on the same text in the same order: loss per step and per second.

    python examples/update_rules.py                            all rules on the documentation that comes with Python
    python examples/update_rules.py --rules mamba2 gla my.txt  two of them on your own text

Bytes in, bytes out. Everything but the token mixer is the same in all models, with about as many weights. Prints a table and
saves a plot. The figures are from one seed and a short run: they show that each rule learns and what a step costs, not
which rule is best.
"""

import argparse
import math
import time
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linattn
from linattn.nn.retention import rotate

WIDTH, HEADS, DIM = 128, 4, 32


class SoftmaxAttention(nn.Module):
    """The baseline: causal softmax attention with rotary positions, O(T^2)."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        q, k = (rotate(y, places, 10000.0) for y in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


RULES = {
    "softmax": SoftmaxAttention,
    "retention": lambda: linattn.nn.Retention(WIDTH, num_heads=HEADS, expand_v=1.0),
    "lightning": lambda: linattn.nn.LightningAttention(WIDTH, num_heads=HEADS, head_dim=DIM),
    "gla": lambda: linattn.nn.GatedLinearAttention(WIDTH, num_heads=HEADS, expand_k=1.0),
    "mamba2": lambda: linattn.nn.Mamba2(WIDTH, num_heads=6, head_dim=32, state_size=32),
    "deltanet": lambda: linattn.nn.GatedDeltaNet(
        WIDTH, num_key_heads=HEADS, num_value_heads=HEADS, key_head_dim=DIM, value_head_dim=DIM
    ),
    "kda": lambda: linattn.nn.KimiDeltaAttention(WIDTH, num_heads=HEADS, head_dim=DIM),
}


class Block(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer, self.norm1, self.norm2 = mixer, nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, rule: str, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(RULES[rule]()) for _ in range(layers)))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        """Bytes (B, T + 1) -> the mean loss of predicting each from those before it, in nats."""
        x = self.norm(self.blocks(self.embed(batch[:, :-1])))
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), batch[:, 1:].flatten())


def train(rule: str, data: Tensor, held_out: Tensor, args: argparse.Namespace) -> dict[str, list[float]]:
    """Held-out loss every few steps, beside the step and the seconds of training until then."""
    torch.manual_seed(args.seed)
    model = LanguageModel(rule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20))
    order = torch.Generator().manual_seed(args.seed)  # the same batches for every rule
    seconds, found = 0.0, {"step": [], "seconds": [], "loss": [], "weights": []}
    for step in range(1, args.steps + 1):
        at = torch.randint(len(data) - args.length, (args.batch, 1), generator=order)
        batch = data[at + torch.arange(args.length + 1)]
        start = time.perf_counter()
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seconds += time.perf_counter() - start
        if step % max(1, args.steps // 10) == 0 or step == args.steps:
            with torch.no_grad():
                found["loss"].append(model(held_out).item())
            found["step"].append(step)
            found["seconds"].append(seconds)
    found["weights"] = [sum(p.numel() for p in model.parameters())]
    return found


def loss_after(run: dict[str, list[float]], seconds: float) -> float:
    """Interpolated between the evaluations around that time; that of the first if it is earlier."""
    times, losses = run["seconds"], run["loss"]
    for i in range(1, len(times)):
        if times[i] >= seconds:
            share = (seconds - times[i - 1]) / (times[i] - times[i - 1])
            return losses[i - 1] + max(0.0, share) * (losses[i] - losses[i - 1])
    return losses[-1]


def report(runs: dict[str, dict[str, list[float]]]) -> str:
    """A row for each rule: held-out loss halfway and at the end, and after as many seconds as the fastest rule took."""
    limit = min(run["seconds"][-1] for run in runs.values())
    first = next(iter(runs.values()))["step"]
    middle = first[len(first) // 2 - 1] if len(first) > 1 else first[0]
    head = ["rule", "weights", "ms per step", f"loss, step {middle}", f"step {first[-1]}", f"after {limit:.0f} s"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for rule, run in runs.items():
        losses = [run["loss"][first.index(middle)], run["loss"][-1], loss_after(run, limit)]
        per_step = 1e3 * run["seconds"][-1] / run["step"][-1]
        lines.append([rule, f"{run['weights'][0]:.0f}", f"{per_step:.0f}", *(f"{x:.3f}" for x in losses)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(runs: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, unit in zip(axes, ("step", "seconds"), strict=True):
        for rule, run in runs.items():
            axis.plot(run[unit], run["loss"], label=rule)
        axis.set_xlabel(unit)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out loss, nats per byte")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256, help="bytes of a training sequence")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("update_rules.png"))
    args = parser.parse_args()

    texts = [path.read_bytes() for path in args.files] or [x.encode() for x in topics.topics.values()]
    data = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8).long()
    cut = int(0.95 * len(data))
    rows = min(16, (len(data) - cut) // (args.length + 1))
    if rows < 1:
        raise SystemExit(f"{len(data)} bytes are too few for sequences of {args.length}: pass more text or --length.")
    held_out = data[cut : cut + rows * (args.length + 1)].unflatten(0, (rows, args.length + 1))
    print(f"{len(data)} bytes, {args.steps} steps of {args.batch} x {args.length}; uniform loss {math.log(256):.3f}")
    runs = {}
    for rule in args.rules:
        runs[rule] = train(rule, data[:cut], held_out, args)
        print(f"{rule}: held-out loss {runs[rule]['loss'][-1]:.3f} in {runs[rule]['seconds'][-1]:.0f} s", flush=True)
    print(report(runs))
    try:
        plot(runs, args.plot)
        print(f"plot: {args.plot}")
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
