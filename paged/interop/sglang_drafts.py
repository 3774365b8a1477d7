"""Backends of SGLang's draft workers (EAGLE, EAGLE-3, standalone draft models); importing this imports SGLang.

A worker drafts a chain of tokens in decodes, each with a backend of its own, and sees verified tokens in extends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view


class PagedDraftBackends:
    """Backends of a chain's decodes, which SGLang prepares together before the first of them."""

    needs_cpu_seq_lens = False

    def __init__(self, make_backend: Callable[[Any], Any], runner: Any, num_steps: int) -> None:
        """num_steps: drafts of a chain. The verification of the tokens before gives the first one.

        Raises:
            UnsupportedError: as the backends that `make_backend` makes.
        """
        self.attn_backends: list[Any] = []
        for step in range(1, num_steps):
            backend = make_backend(runner)
            backend.num_drafted = step
            self.attn_backends.append(backend)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of all decodes of a chain."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that the graph of a chain reads, see `PagedAttnBackend`."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copy a batch to the tensors of `init_cuda_graph_state`, before the graph is captured or replayed."""
        batch = build_inner_fb_view(
            forward_batch,
            bs=forward_batch.batch_size,
            forward_mode=ForwardMode.DECODE,
            encoder_lens=forward_batch.encoder_lens,
        )
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing: a graph reads what `init_forward_metadata_out_graph` copied."""
