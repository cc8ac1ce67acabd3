r"""A language model trained on sequences that several processes share, with data parallelism beside; survives kill -9.

    python examples/sequence_parallel.py --steps 20                                              one process
    torchrun --nproc-per-node 4 examples/sequence_parallel.py --sequence 2 --steps 20            2 x 2 processes, same losses
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 4 --max-restarts 3 examples/sequence_parallel.py \
        --sequence 4 --length 65536 --batch 1 --checkpoint run.pt

Bytes in, bytes out; the text is Python's own documentation, or files. Every process holds a part of each sequence and of each
batch. A checkpoint is written every few steps: if a process dies, torchrun starts all of them again and they go on from it.
(The variable makes torchrun forget the addresses of the processes that died.) On two machines: see docs/parallel.md.
"""

import argparse
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import linattn

WIDTH = 64


class Block(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.mixer, self.norm1, self.norm2 = mixer, nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A gated delta rule, Mamba-2 and retention: convolutions, states and positions that cross from shard to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        heads = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}
        mixers = [
            linattn.nn.GatedDeltaNet(WIDTH, **heads),
            linattn.nn.Mamba2(WIDTH, num_heads=4, head_dim=32, state_size=16),
            linattn.nn.Retention(WIDTH, num_heads=4),
        ]
        self.blocks = nn.Sequential(*(Block(mixer) for mixer in mixers))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(ids))) @ self.embed.weight.T


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whole or not at all: a process that dies while writing leaves the checkpoint before."""
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    os.replace(temporary, path)


def train(args: argparse.Namespace, data: Tensor) -> None:
    shared = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    if world % args.sequence or args.batch % (world // args.sequence):
        raise SystemExit(f"{world} processes cannot share {args.batch} sequences in groups of {args.sequence}.")
    torch.manual_seed(args.seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        kept = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
        if rank == 0:
            print(f"going on after step {first}", flush=True)
    wrapped = DistributedDataParallel(model) if shared else model
    mesh, shape = None, (world // args.sequence, args.sequence)
    if shared:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    for step in range(first, args.steps):
        order = torch.Generator().manual_seed(args.seed * 1_000_003 + step)  # the batch depends on the step alone
        at = torch.randint(len(data) - args.length, (args.batch, 1), generator=order)
        batch = data[at + torch.arange(args.length + 1)]
        if mesh is None:
            loss = F.cross_entropy(wrapped(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        else:
            rows = batch[mesh.get_local_rank("data") :: shape[0]]
            with linattn.parallel.sequence_parallel(mesh):
                ids, targets = (linattn.parallel.shard(x) for x in (rows[:, :-1], rows[:, 1:]))
                total = F.cross_entropy(wrapped(ids).flatten(0, 1), targets.flatten(), reduction="sum")
            loss = linattn.parallel.mean_loss(total, targets.numel(), group=dist.group.WORLD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1:5}  loss {loss.item():.6f}", flush=True)
            if args.losses is not None:
                with args.losses.open("a") as file:
                    file.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")
            if args.checkpoint is not None and (step + 1) % args.every == 0:
                save(args.checkpoint, step + 1, model, optimizer)
        if args.kill_at == step + 1 and rank == world - 1 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # to see what happens then


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="text to train on (default: Python's documentation)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=512, help="bytes of a sequence, over all processes that share it")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step, over all processes")
    parser.add_argument("--sequence", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--checkpoint", type=Path, help="file to write every few steps, and to go on from if it exists")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--losses", type=Path, help="file that gets a line of JSON for every step")
    parser.add_argument(
        "--kill-at", type=int, help="the last process kills itself after this step, if it started at step 0"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts = [path.read_bytes() for path in args.files] or [x.encode() for x in topics.topics.values()]
    data = torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8).long()
    if len(data) <= args.length + 1:
        raise SystemExit(f"{len(data)} bytes are too few for sequences of {args.length}: pass more text or --length.")
    if "WORLD_SIZE" not in os.environ:
        return train(args, data)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    train(args, data)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still hold work that Python's own end would interrupt


if __name__ == "__main__":
    main()
