"""llama.cpp in its own environment, with gguf and safetensors, which `quantized.py` and `busy_peers.py` start.
It imports nothing of ours.

    python -P llama_cpp_process.py CHECKPOINT FORMAT THREADS

Writes a plain Llama checkpoint as GGUF beside it, in FORMAT: BF16, or Q4_0 or Q8_0 with embeddings in Q8_0.
Queries and keys keep their order, so texts differ and times do not. For each line of stdin with `batch`, `steps` and
`context` it writes the seconds of decode steps behind `context` tokens; it starts anew before sequences exceed
`most_tokens`. For a line with `prompt` it writes the seconds of a prompt of this many tokens. `LLAMA_CPP_LIB_PATH` may
name a folder with the library.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

# llama.cpp's default batch for prompts.
_PROMPT_BATCH = 512


def write(folder: Path, form: str) -> Path:
    """Write FOLDER.FORMAT.gguf, unless it exists."""
    gguf: Any = importlib.import_module("gguf")
    np: Any = importlib.import_module("numpy")
    stored: Any = importlib.import_module("safetensors")
    config = json.loads((folder / "config.json").read_text())
    path = folder.with_suffix(f".{form}.gguf")
    if path.exists():
        return path
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in folder.glob("*.safetensors"):
        for name, tensor in stored.deserialize(file.read_bytes()):
            theirs = names.get_name(name, (".weight",))
            words = np.frombuffer(tensor["data"], np.uint16).astype(np.uint32) << 16  # bfloat16
            values = words.view(np.float32).reshape(tensor["shape"])
            if values.ndim == 1:
                writer.add_tensor(theirs, values)
                continue
            kind = gguf.GGMLQuantizationType[form]
            if form.startswith("Q") and theirs in ("token_embd.weight", "output.weight"):
                kind = gguf.GGMLQuantizationType["Q8_0"]
            writer.add_tensor(theirs, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Decoder:
    """Decode steps of some sequences."""

    def __init__(self, model: Any, batch: int, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = batch * 256, batch, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(model, params)
        self.batch, self.tokens, self.position = batch, self.lib.llama_batch_init(batch, 0, 1), 0

    def begin(self, context: int) -> None:
        """Run steps until sequences have this many tokens."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        self.position = 0
        for _ in range(context):
            self.step()

    def step(self) -> float:
        """Run a step and return its seconds."""
        tokens = self.tokens
        tokens.n_tokens = self.batch
        for row in range(self.batch):
            tokens.token[row], tokens.pos[row], tokens.n_seq_id[row] = 5, self.position, 1
            tokens.seq_id[row][0], tokens.logits[row] = row, 1
        start = perf_counter()
        if self.lib.llama_decode(self.context, tokens):
            raise RuntimeError("llama_decode failed")
        self.lib.llama_get_logits(self.context)
        self.position += 1
        return perf_counter() - start


class Prompt:
    """A prompt of `length` tokens, in batches of 512, and the logits of its last token."""

    def __init__(self, model: Any, length: int, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch = length, _PROMPT_BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(model, params)
        self.length, self.tokens = length, self.lib.llama_batch_init(_PROMPT_BATCH, 0, 1)

    def run(self) -> float:
        """Run the prompt and return its seconds."""
        tokens = self.tokens
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        start = perf_counter()
        for begin in range(0, self.length, _PROMPT_BATCH):
            tokens.n_tokens = min(_PROMPT_BATCH, self.length - begin)
            for row in range(tokens.n_tokens):
                tokens.token[row], tokens.pos[row], tokens.n_seq_id[row] = row, begin + row, 1
                tokens.seq_id[row][0], tokens.logits[row] = 0, begin + row == self.length - 1
            if self.lib.llama_decode(self.context, tokens):
                raise RuntimeError("llama_decode failed")
        self.lib.llama_get_logits(self.context)
        return perf_counter() - start


def instructions(lib: Any) -> str:
    """Return the names of the instruction sets that the library was compiled for."""
    names = []
    for part in lib.llama_print_system_info().decode().split("|"):
        name, _, value = part.rpartition("=")
        if value.strip() == "1":
            names.append(name.rpartition(":")[2].strip())
    return " ".join(names)


def main(folder: str, form: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with answers
    path = write(Path(folder), form)
    lib: Any = importlib.import_module("llama_cpp")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
    about = {"version": lib.__version__, "bytes": path.stat().st_size, "instructions": instructions(lib)}
    print(json.dumps(about), file=answers, flush=True)
    decoder_of = cache(lambda batch: Decoder(model, batch, int(threads)))
    prompt = cache(lambda length: Prompt(model, length, int(threads)))
    for line in sys.stdin:
        job = json.loads(line)
        if "prompt" in job:
            seconds = [prompt(job["prompt"]).run()]
        else:
            decoder = decoder_of(job["batch"])
            if not decoder.position or decoder.position + job["steps"] > job["most_tokens"]:
                decoder.begin(job["context"])
            seconds = [decoder.step() for _ in range(job["steps"])]
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
