"""llama.cpp in its own environment, with gguf and safetensors, which `quantized.py` starts; imports nothing of ours.

    python -P llama_cpp_process.py CHECKPOINT FORMAT THREADS

Writes a plain Llama checkpoint as GGUF beside it, in FORMAT (Q4_0, Q8_0), its embeddings in Q8_0. Queries and keys stay
in their order: texts differ, times do not. Then for each line of stdin with `batch`, `steps` and `context` it writes
the seconds of decode steps. `LLAMA_CPP_LIB_PATH` may name a folder with the library.
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
            if theirs in ("token_embd.weight", "output.weight"):
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


def main(folder: str, form: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with answers
    path = write(Path(folder), form)
    lib: Any = importlib.import_module("llama_cpp")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
    print(json.dumps({"version": lib.__version__, "bytes": path.stat().st_size}), file=answers, flush=True)
    decoder = cache(lambda batch: Decoder(model, batch, int(threads)))
    for line in sys.stdin:
        job = json.loads(line)
        decoder(job["batch"])
        while decoder(job["batch"]).position < job["context"]:
            decoder(job["batch"]).step()
        print(json.dumps([decoder(job["batch"]).step() for _ in range(job["steps"])]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
