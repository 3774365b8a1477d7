"""A whole SGLang in one process: its scheduler with radix cache, pools, model runner and model, without HTTP."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative import cache_locs, spec_tree
from sglang.kernels.ops.speculative import eagle as accepted
from sglang.srt.arg_groups import model_hook
from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import allocation, memory_pool
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative import eagle_utils

# Published checkpoints of DeepSeek have settings that transformers does not write.
_ROUTING = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
PUBLISHED = {
    "deepseek_v3": _ROUTING,
    "deepseek_v32": _ROUTING,
    "glm_moe_dsa": _ROUTING | {"first_k_dense_replace": 1, "indexer_rope_interleave": True},
}


class Sglang:
    """SGLang's scheduler, stepped by hand.

    Attributes:
        steps: mode and cached prefixes of every step.
        outputs: tokens by request.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.steps: list[tuple[str, list[int]]] = []
        self.outputs: dict[str, list[int]] = {}
        scheduler.output_streamer.send_to_detokenizer = self

    def send_output(self, out: Any, request: Any = None) -> None:
        """Keep what SGLang would send to its detokenizer."""
        for request_id, token_ids in zip(out.rids, out.output_ids, strict=True):
            self.outputs.setdefault(request_id, []).extend(token_ids)

    def add(self, request_id: str, prompt: list[int], max_new_tokens: int) -> None:
        """Queue a greedy request."""
        sampling = SamplingParams(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
        sampling.normalize(None)
        unused = dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
        request = TokenizedGenerateReqInput(
            rid=request_id,
            input_text="",
            input_ids=array("q", prompt),
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            stream=False,
            **unused,
        )
        self.scheduler.process_input_requests([request])

    @torch.no_grad()
    def step(self) -> bool:
        """Run one batch; return whether there was one."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            prefixes = list(batch.prefix_lens) if batch.forward_mode.is_extend() else []
            self.steps.append((batch.forward_mode.name, prefixes))
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return bool(batch)


@contextmanager
def without_gpu_settings() -> Iterator[None]:
    """Skip what SGLang sets for models with an indexer by the GPU: the dtype of the cache, and its own kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        for name in ("_dsa_kv_cache_dtype_default", "_dsa_split_backend_resolution"):
            patch.setattr(model_hook, name, lambda settings: {})
        yield


@contextmanager
def drafting_kernels() -> Iterator[list[list[list[int]]]]:
    """Have SGLang manage drafts by its Triton kernels, in the interpreter, for `sgl_kernel` is missing.

    Yields the chains of each verification, which begin with the last verified token.
    """
    chains: list[list[list[int]]] = []
    verify = eagle_utils.verify_tree_greedy_func

    def verify_recorded(**arguments: Any) -> Any:
        chains.append(arguments["candidates"].tolist())
        return verify(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (allocation, cache_locs, accepted, spec_tree):
            patch.setattr(module, "_is_cpu", False)
        patch.setattr(cache_locs, "_is_xpu", True)
        patch.setattr(spec_tree, "_is_xpu", True)  # trees by Triton
        patch.setattr(memory_pool, "copy_all_layer_kv_cache_func", lambda *arguments: None)  # a warm-up
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(eagle_utils, "verify_tree_greedy_func", verify_recorded)
        yield chains


@contextmanager
def run_sglang(family: str, folder: Path, **options: Any) -> Iterator[Sglang]:
    """SGLang of a checkpoint of tests/models/families.py, on a CPU in float32."""
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | PUBLISHED.get(family, {})))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    settings |= {"max_total_tokens": 512, "max_running_requests": 4, "context_length": 128, "page_size": 8}
    settings |= {"chunked_prefill_size": 24, "enable_mixed_chunk": True, "disable_overlap_schedule": True}
    settings |= {"sampling_backend": "pytorch", "grammar_backend": "none", "disable_cuda_graph": True}
    arguments = ServerArgs(str(folder), **settings | options)
    ports = PortArgs.init_new(arguments)
    with without_gpu_settings():
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    try:
        yield Sglang(Scheduler(arguments, ports))
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
        reset_context()
