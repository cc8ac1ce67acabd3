"""What the tests share: every kernel by name, one table of tolerances, inputs from a seed."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores, and so do the processes that tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which NumPy reads when it is imported

import pytest
import torch
from torch import Tensor

from linattn import kernels
from linattn.kernels import Kernel

DIM = 8

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end, one of them would keep a worker busy while the others have nothing to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """What is there now stays: the garbage collector need not look at modules and tests again, of which there are millions."""
    gc.collect()
    gc.freeze()


class Squares(torch.nn.Module):
    """A feature map with weights of its own, for Custom."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12, DIM, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype).T).square() + 0.1


def statistics() -> kernels.Precondition:
    generator = torch.Generator().manual_seed(2)
    sample = torch.randn(2, 1, 200, DIM, generator=generator) + 0.3
    return kernels.Precondition.from_samples(sample[0], sample[1])


# Every family, and every option that changes the features.
KERNELS: dict[str, Callable[[], Kernel]] = {
    "positive": lambda: kernels.Positive(DIM, 24),
    "positive-iid": lambda: kernels.Positive(DIM, 24, orthogonal=False, seed=3),
    "positive-hyperbolic": lambda: kernels.Positive(DIM, 24, hyperbolic=True),
    "positive-optimal": lambda: kernels.Positive(DIM, 24, optimal=True),
    "positive-preconditioned": lambda: kernels.Positive(DIM, 24, precondition=statistics()),
    "trig": lambda: kernels.Trig(DIM, 64),
    "trig-temperature": lambda: kernels.Trig(DIM, 64, temperature=2.0, learn_temperature=True),
    "polynomial-2": lambda: kernels.Polynomial(2, 1.0),
    "polynomial-4": lambda: kernels.Polynomial(4, 20.0),
    "taylor": lambda: kernels.Taylor(2),
    "taylor-preconditioned": lambda: kernels.Taylor(2, precondition=statistics()),
    "elu": lambda: kernels.Elu(),
    "relu": lambda: kernels.Relu(),
    "learned": lambda: kernels.Learned(DIM, 10),
    "custom": lambda: kernels.Custom(Squares()),
}
# These may have denominators near zero, where no tolerance holds; they are tested on their own terms.
SIGNED: dict[str, Callable[[], Kernel]] = {
    "polynomial-3": lambda: kernels.Polynomial(3, 4.0),
    "polynomial-sketch": lambda: kernels.Polynomial(2, 1.0, sketch=64, dim=DIM),
}

# Largest difference allowed, relative to the largest number compared.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(params=list(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]()


def tokens(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 1.0, grad: bool = False
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype).requires_grad_(grad)


def qkv(
    n: int = 37,
    *,
    s: int | None = None,
    batch: tuple[int, ...] = (2,),
    heads: int = 2,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
    value_dim: int = 5,
) -> tuple[Tensor, Tensor, Tensor]:
    s, kv_heads = n if s is None else s, heads if kv_heads is None else kv_heads
    return (
        tokens(*batch, heads, n, DIM, seed=1, dtype=dtype, grad=grad),
        tokens(*batch, kv_heads, s, DIM, seed=2, dtype=dtype, grad=grad),
        tokens(*batch, kv_heads, s, value_dim, seed=3, dtype=dtype, grad=grad),
    )


def forgetting(form: str, gate: Tensor) -> dict[str, Tensor]:
    """The options that forget by a factor `gate` in (0, 1): {"gate": ..}, {"log_decay": ..}, or none."""
    return {"": {}, "gate": {"gate": gate}, "log_decay": {"log_decay": gate.log()}}[form]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, factor: float = 1.0) -> None:
    """Equal to the table's tolerance, relative to the largest expected number."""
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return
    difference = (actual.double() - expected.double()).abs().max().item()
    bound = factor * TOLERANCE[dtype or actual.dtype] * max(expected.double().abs().max().item(), 1e-30)
    assert difference <= bound, f"differs by {difference:.3g}, allowed {bound:.3g}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama with random weights and a tokenizer of single words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), eos_token_id=1, pad_token_id=1, **sizes)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(
        folder
    )
    return folder
