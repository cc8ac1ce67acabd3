"""A soak of a running server: many clients, random cancels and bad bodies; every whole answer is the one given alone.

    linattn serve --model smollm2 --kernel nearfar --dtype float64 --state-memory 512 --port 8080
    python benchmarks/serve_soak.py --url http://127.0.0.1:8080 --clients 64 --minutes 5

Answers at temperature 0 are equal to the last token with --dtype float64 or --reproducible. In float32 the sum of a matrix
product depends on how many rows it has, in its last bits: an answer may differ where two tokens are almost equally likely.
"""

import argparse
import json
import random
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

WORDS = [
    "river",
    "stone",
    "window",
    "paper",
    "garden",
    "light",
    "winter",
    "bridge",
    "music",
    "letter",
    "orange",
    "cloud",
]


@dataclass
class Outcome:
    """What the clients saw. wrong: answers that differ from the one given alone, with both."""

    equal: int = 0
    cancelled: int = 0
    refused: int = 0
    busy: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    memory_middle: int = 0
    memory_after: int = 0
    running_after: int = -1


def prompts(seed: int, count: int = 24) -> list[str]:
    """Texts of many lengths, some of which begin alike."""
    rng = random.Random(seed)
    common = " ".join(rng.choice(WORDS) for _ in range(60))
    found = []
    for i in range(count):
        text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([3, 10, 40, 120])))
        found.append(f"{common} {text}" if i % 2 else text)
    return found


class Soak:
    """Clients in threads against one server."""

    def __init__(self, url: str, key: str | None, model: str, max_tokens: int):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=600, limits=limits)
        self.model, self.max_tokens = model, max_tokens
        self.outcome, self.lock = Outcome(), threading.Lock()

    def body(self, prompt: str, **options: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": self.max_tokens, **options}

    def whole(self, prompt: str) -> str | None:
        """An answer; None if the server is busy."""
        response = self.http.post("/v1/completions", json=self.body(prompt))
        if response.status_code == 429:
            return None
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])

    def streamed(self, prompt: str, leave_after: int | None) -> str | None:
        """An answer in chunks; None if the client left, after some of them."""
        text = ""
        with self.http.stream("POST", "/v1/completions", json=self.body(prompt, stream=True)) as response:
            response.raise_for_status()
            for i, line in enumerate(response.iter_lines()):
                if leave_after is not None and i >= leave_after:
                    return None
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    def bad(self, rng: random.Random) -> None:
        """A body that must be refused."""
        bodies: list[Any] = [{}, {"prompt": 5}, {"prompt": "x", "n": 99}, [], {"prompt": "x", "max_tokens": -1}]
        response = self.http.post("/v1/completions", json=rng.choice(bodies))
        assert response.status_code == 400, response.status_code
        self.count(refused=1)

    def count(self, **counts: int) -> None:
        with self.lock:
            for name, number in counts.items():
                setattr(self.outcome, name, getattr(self.outcome, name) + number)

    def client(self, seed: int, alone: dict[str, str], until: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            prompt, kind = rng.choice(list(alone)), rng.random()
            if kind < 0.1:
                self.bad(rng)
                continue
            if kind < 0.3:
                self.streamed(prompt, rng.randrange(1, 6))
                self.count(cancelled=1)
                continue
            found = self.whole(prompt) if kind < 0.65 else self.streamed(prompt, None)
            if found is None:
                self.count(busy=1)
            elif found == alone[prompt]:
                self.count(equal=1)
            else:
                with self.lock:
                    self.outcome.wrong.append((prompt, alone[prompt], found))

    def memory(self) -> int:
        return int(self.http.get("/v1/status").json()["resident_bytes"])


def run(url: str, *, key: str | None, model: str, clients: int, seconds: float, seed: int, max_tokens: int) -> Outcome:
    """Answers of every prompt alone, then all clients together for some seconds."""
    soak = Soak(url, key, model, max_tokens)
    alone = {prompt: soak.whole(prompt) or "" for prompt in prompts(seed)}
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=soak.client, args=(seed + i, alone, until)) for i in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 2)
    soak.outcome.memory_middle = soak.memory()
    for thread in threads:
        thread.join()
    time.sleep(0.5)
    status = soak.http.get("/v1/status").json()
    soak.outcome.running_after = status["running"] + status["reading"] + status["waiting"]
    soak.outcome.memory_after = soak.memory()
    soak.http.close()
    return soak.outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path, default=Path("out/serve-soak.json"))
    args = parser.parse_args()
    model = httpx.get(f"{args.url}/health").json()["model"]
    found = run(
        args.url,
        key=args.key,
        model=model,
        clients=args.clients,
        seconds=60 * args.minutes,
        seed=0,
        max_tokens=args.max_tokens,
    )
    print(
        f"{found.equal} answers equal to the one alone, {len(found.wrong)} not; {found.cancelled} cancelled, ", end=""
    )
    print(f"{found.refused} bad bodies refused, {found.busy} turned away; {found.running_after} left running;")
    print(f"memory {found.memory_middle / 2**20:.0f} MiB half-way, {found.memory_after / 2**20:.0f} MiB at the end")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(asdict(found), indent=1))
    raise SystemExit(1 if found.wrong or found.running_after else 0)


if __name__ == "__main__":
    main()
