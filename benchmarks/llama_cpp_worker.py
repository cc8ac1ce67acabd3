"""One run of llama.cpp in an environment of its own: `python -I llama_cpp_worker.py JOB.json` prints a line of JSON.

`-I` keeps this folder, with a file llama_cpp.py, off the path.
"""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

import llama_cpp


def peak_mib() -> float:
    """The most memory this process had; ru_maxrss would count its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def load(job: dict, **options: object) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        job["model"],
        n_ctx=job["context"],
        n_batch=job["chunk"],
        n_ubatch=job["chunk"],
        n_threads=1,
        n_threads_batch=1,
        flash_attn=job["flash"],
        verbose=False,
        **options,
    )


def last_logits(model: llama_cpp.Llama) -> np.ndarray:
    """(vocabulary,) after the last token that was read."""
    found = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return np.ctypeslib.as_array(found, (model.n_vocab(),))


def written(model: llama_cpp.Llama, count: int) -> list[int]:
    """So many tokens, greedily, each read back."""
    tokens = []
    for _ in range(count):
        tokens.append(int(last_logits(model).argmax()))
        model.eval(tokens[-1:])
    return tokens


def timed(job: dict) -> dict:
    model = load(job)
    model.eval(job["ids"][:16])
    model.reset()
    begun = time.process_time()
    model.eval(job["ids"])
    read = time.process_time()
    tokens = written(model, job["tokens"])
    ended = time.process_time()
    return {"read": read - begun, "written": ended - read, "peak_mib": peak_mib(), "tokens": tokens}


def checked(job: dict) -> dict:
    """Perplexity of the ids, their text's tokens as llama.cpp cuts it, and the first tokens written after a prompt."""
    model = load(job, logits_all=True)
    ids = job["ids"]
    model.eval(ids)
    scores = np.asarray(model.scores[: len(ids) - 1], dtype=np.float64)
    scores -= scores.max(-1, keepdims=True)
    right = scores[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(scores).sum(-1))
    model.reset()
    model.eval(ids[: job["prompt"]])
    return {
        "perplexity": float(np.exp(-right.mean())),
        "cut": model.tokenize(job["text"].encode(), add_bos=False, special=False),
        "tokens": written(model, job["tokens"]),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found = {"time": timed, "check": checked}[job["what"]](job)
    print(json.dumps(found | {"version": llama_cpp.__version__}))


if __name__ == "__main__":
    main()
