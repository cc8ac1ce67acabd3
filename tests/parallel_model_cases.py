"""Whole models over shards: layers of linattn.nn, transformers with linattn attached, data parallelism beside."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import linattn
from linattn import parallel
from linattn.parallel.groups import Members
from parallel_comparison import LENGTHS

WIDTH = 16
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "deltanet": lambda: linattn.nn.GatedDeltaNet(
        WIDTH, num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=4
    ),
    "kda": lambda: linattn.nn.KimiDeltaAttention(WIDTH, num_heads=2, head_dim=4),
    "mamba2": lambda: linattn.nn.Mamba2(WIDTH, num_heads=4, head_dim=4, state_size=8),
    "lightning": lambda: linattn.nn.LightningAttention(WIDTH, num_heads=2, head_dim=4),
    "retention": lambda: linattn.nn.Retention(WIDTH, num_heads=2),
    "gla": lambda: linattn.nn.GatedLinearAttention(WIDTH, num_heads=2),
}


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def close(found: Tensor, expected: Tensor, limit: float = 1e-10) -> None:
    if expected.numel():
        torch.testing.assert_close(found, expected, atol=limit, rtol=limit)


def layers(who: Members) -> None:
    """Each layer with padding, two of them with their states."""
    lengths = LENGTHS[who.size][0]
    start, stop = sum(lengths[: who.rank]), sum(lengths[: who.rank + 1])
    for name, make in LAYERS.items():
        torch.manual_seed(1)
        model = make().double()
        x, mask = torch.randn(2, sum(lengths), WIDTH, dtype=torch.float64), torch.rand(2, sum(lengths)) > 0.2
        returned = {"return_state": True} if name in ("deltanet", "retention") else {}
        found = model(x, key_mask=mask, **returned)
        out, state = found if returned else (found, None)
        out.sin().sum().backward()
        one = gradients(model)
        model.zero_grad()
        with parallel.sequence_parallel(who.group):
            found = model(x[:, start:stop], key_mask=mask[:, start:stop], **returned)
            rows, after = found if returned else (found, None)
            rows.sin().sum().backward()
        close(rows, out[:, start:stop])
        if state is not None:
            close(after.rule.S, state.rule.S)
            if state.conv is not None:
                close(after.conv.inputs, state.conv.inputs)
        for mine, expected in zip(gradients(model), one, strict=True):
            dist.all_reduce(mine, group=who.group)
            close(mine, expected, 1e-9)


def transformer_layers(who: Members) -> None:
    """torch's stack with our layers, causal and not."""
    torch.manual_seed(2)
    layer = linattn.nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True, kernel="elu")
    model = linattn.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    x = torch.randn(2, 21, WIDTH, dtype=torch.float64)
    mine = parallel.shard(x, group=who.group)
    for causal in (False, True):
        mask, part = (
            nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=x.dtype) if causal else None
            for y in (x, mine)
        )
        out = model(x, mask=mask, is_causal=causal)
        with parallel.sequence_parallel(who.group):
            rows = model(mine, mask=part, is_causal=causal)
            close(parallel.unshard(rows), out)


def attached(who: Members) -> None:
    """Logits, loss and gradients of a model with positions; some layers keep softmax."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    hybrid = transformers.Qwen3NextConfig(
        **small,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=0,
        mlp_only_layers=[0, 1],
    )
    mamba = transformers.Mamba2Config(
        **small, num_heads=4, head_dim=16, expand=2, state_size=8, n_groups=2, chunk_size=8
    )
    models = [(transformers.LlamaForCausalLM, config, kernel) for kernel in ("elu", "nearfar", {1: "positive"})]
    models += [(transformers.Qwen3NextForCausalLM, hybrid, "softmax"), (transformers.Mamba2ForCausalLM, mamba, None)]
    for kind, settings, kernel in models:
        torch.manual_seed(1)
        model = linattn.hf.attach(kind(settings).double(), kernel=kernel)
        ids = torch.randint(50, (2, 30))
        mask = torch.ones_like(ids)
        if kernel is not None and settings is config:
            mask[0, :4] = 0  # padding on the left
        labels = ids.masked_fill(mask == 0, -100)
        one = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        one.loss.backward()
        expected = gradients(model)
        model.zero_grad()
        with parallel.sequence_parallel(who.group):
            cut = [parallel.shard(x) for x in (ids, mask, labels)]
            found = model(input_ids=cut[0], attention_mask=cut[1], labels=cut[2])
            found.loss.backward()
        close(found.logits[:, 4:], parallel.shard(one.logits, group=who.group)[:, 4:])
        close(found.loss, one.loss, 1e-5)  # transformers computes it in float32
        for mine, whole in zip(gradients(model), expected, strict=True):
            dist.all_reduce(mine, group=who.group)
            close(mine / who.size, whole, 1e-6)
        linattn.hf.detach(model)


def helpers(who: Members) -> None:
    """Labels at the borders of shards, positions, shards and losses."""
    ids = torch.arange(2 * 9).reshape(2, 9)
    lengths = [4, 0, 3, 2][: who.size - 1] if who.size > 2 else [4]
    lengths = [*lengths, 9 - sum(lengths)]
    start, stop = sum(lengths[: who.rank]), sum(lengths[: who.rank + 1])
    with parallel.sequence_parallel(who.group):
        mine = ids[:, start:stop]
        expected = F.pad(ids[:, 1:], (0, 1), value=-100)[:, start:stop]
        assert torch.equal(parallel.next_labels(mine), expected)
        assert torch.equal(parallel.positions(stop - start), torch.arange(start, stop))
        x = mine.double().requires_grad_()
        assert torch.equal(parallel.unshard(x, 1), ids.double())
        (parallel.unshard(x, 1) * ids).sum().backward()
        assert torch.equal(x.grad, who.size * mine.double())
        loss = parallel.mean_loss((x.detach() * 2).sum(), mine.numel())
        close(loss, ids.double().mean() * 2)


class Model(nn.Module):
    """Embedding, two mixers with a convolution among them, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.mixers = nn.ModuleList([LAYERS["deltanet"](), LAYERS["mamba2"](), LAYERS["retention"]()])
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for mixer in self.mixers:
            x = x + mixer(x)
        return self.head(x)


def data_and_sequence(who: Members) -> None:
    """A 2 x 2 mesh: DDP and FSDP2 over all processes, each pair of them sharing sequences, for three steps."""
    if who.size != 4:
        return
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    data, row = torch.randint(30, (3, 4, 25), generator=torch.Generator().manual_seed(0)), mesh.get_local_rank("data")

    def train(wrap: Callable[[nn.Module], nn.Module] | None) -> list[float]:
        torch.manual_seed(3)
        model = Model().double()
        wrapped = model if wrap is None else wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
        losses = []
        for batch in data:
            if wrap is None:
                total = F.cross_entropy(wrapped(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            else:
                with parallel.sequence_parallel(mesh):
                    ids, targets = (parallel.shard(x) for x in (batch[row::2, :-1], batch[row::2, 1:]))
                    loss = F.cross_entropy(wrapped(ids).flatten(0, 1), targets.flatten(), reduction="sum")
                    total = parallel.mean_loss(loss, targets.numel(), group=dist.group.WORLD)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            losses.append(total.item())
        return losses

    def sharded(model: nn.Module) -> nn.Module:
        flat = init_device_mesh("cpu", (4,))
        for mixer in model.mixers:
            fully_shard(mixer, mesh=flat)
        return fully_shard(model, mesh=flat)

    expected = train(None)
    for wrap in (DistributedDataParallel, sharded):
        found = train(wrap)
        assert max(abs(x - y) for x, y in zip(found, expected, strict=True)) < 1e-9, (found, expected)
