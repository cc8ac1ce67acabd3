"""benchmarks/gguf_files.py: the same weights and metadata in another type."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf
from gguf.quants import dequantize, quantize

FILE = Path(__file__).parents[2] / "benchmarks" / "gguf_files.py"
TYPE = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def files():
    spec = importlib.util.spec_from_file_location("gguf_files", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path):
    """A file with an embedding in 8 bits, a matrix in 4 and a vector."""
    path = tmp_path / "tiny.Q4_1.gguf"
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    shapes = {"token_embd.weight": ((6, 64), TYPE.Q8_0), "blk.0.attn_q.weight": ((3, 64), TYPE.Q4_1)}
    for name, (shape, kind) in shapes.items():
        writer.add_tensor(name, quantize(rng.standard_normal(shape, dtype=np.float32), kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", rng.standard_normal(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(path):
    return {t.name: dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("F16", 1e-3), ("Q8_0", 0.02), ("Q4_0", 0.4)])
def test_another_type_has_the_same_numbers_and_metadata(files, source, kind, error):
    made = files.file_of_type(source, kind)
    assert made.name == f"tiny.{kind}.gguf"
    before, after = values(source), values(made)
    assert before.keys() == after.keys()
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, atol=error, rtol=0)
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(made).tensors}
    assert types["blk.0.attn_q.weight"] is TYPE[kind]
    assert types["blk.0.attn_norm.weight"] is TYPE.F32
    assert types["token_embd.weight"] is (TYPE.Q8_0 if kind == "Q4_0" else TYPE[kind])
    fields = gguf.GGUFReader(made).fields
    assert fields["llama.block_count"].contents() == 1
    assert fields["llama.rope.freq_base"].contents() == 1e5
    assert fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert fields["general.file_type"].contents() == files.FILE_TYPES[kind]
    assert files.file_of_type(source, files.SHIPPED) == source
