"""A near/far prefill that continues a state passes few files: benchmarks/call_path.py prints the same for other calls."""

import importlib.util
from pathlib import Path

import linattn
from linattn import NearFar
from native_support import needs_native
from nearfar_support import CAUSAL, SMALL, tensors

pytestmark = needs_native
FILE = Path(__file__).parents[2] / "benchmarks" / "call_path.py"


def test_prefill_and_decode_pass_at_most_eight_files():
    spec = importlib.util.spec_from_file_location("call_path", FILE)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    q, k, v = tensors(100)
    options = {"kernel": NearFar(**SMALL), "return_state": True, **CAUSAL}
    _, state = linattn.attention(q, k, v, **options)
    for tokens in ([q, k, v], [x[:, :, :1] for x in (q, k, v)]):

        def call(tokens=tokens):
            return linattn.attention(*tokens, state=state, **options)

        call()
        path = script.call_path(call)
        assert path[0] == path[-1] == "functional/attention.py"
        assert len(set(path)) <= 8
