"""Two replicas of the whole server behind one address, by Ray Serve; each holds an engine.

pip install 'ray[serve]' 'paged[serve]'
python examples/ray_serve.py [FOLDER]
"""

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray import serve

from paged import AsyncEngine, ChatTokenizer, Engine, LlmExecutor
from paged.serving.http.app import make_app
from paged.serving.http.config import ServeConfig
from paged.serving.http.service import Service

FOLDER = str(Path(sys.argv[1] if len(sys.argv) > 1 else "models/recall").resolve())
ADDRESS = "http://127.0.0.1:8123"
ANIMALS = ["otter", "wren", "zebra", "lynx", "heron", "elephant"]
LIST = "otter: kite; wren: pipe; zebra: compass; lynx: ladder; heron: pumpkin; elephant: thimble;"


def build_app() -> Any:
    """Runs in every replica: an engine, all routes of `paged serve`, and one that tells the replicas apart."""
    tokenizer = ChatTokenizer.from_folder(FOLDER)
    executor = LlmExecutor.from_pretrained(FOLDER, num_blocks=256)
    engine = AsyncEngine(Engine(executor, tokenizer=tokenizer))
    service = Service(engine, tokenizer, ServeConfig(model_name="recall"), executor.default_sampling_params)
    gate = make_app(service)
    gate.app.get("/replica")(os.getpid)
    return gate


def ask(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(ADDRESS + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def complete(animal: str) -> str:
    """One of the replicas answers, as it would alone."""
    body = {"prompt": f"{LIST} {animal}:", "temperature": 0, "max_tokens": 4}
    return str(ask("/v1/completions", body)["choices"][0]["text"])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    replica = serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.5}, max_ongoing_requests=64)
    serve.run(replica(serve.ingress(build_app)()).bind())
    with ThreadPoolExecutor(6) as threads:
        for animal, answer in zip(ANIMALS, threads.map(complete, ANIMALS), strict=True):
            print(f"{animal}: -> {answer}")
        print(len(set(threads.map(lambda _: ask("/replica"), range(40)))), "replicas answer at", ADDRESS)
    serve.shutdown()
