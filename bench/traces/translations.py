"""What definitions of FlashInfer-Bench are as operations: inputs as arguments, results, and back.

| definition | operation |
|---|---|
| `rmsnorm_h<size>` | `rms_norm`; eps is the constant EPS of the definition's reference |
| `gqa_paged_decode_...`, `gqa_paged_prefill_causal_...` | `paged_attention` without options |

Definitions of attention name pages as FlashInfer does: the pages of sequence i are
`kv_indices[kv_indptr[i] : kv_indptr[i + 1]]`. Its log-sum-exp has base 2 and tokens before heads.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from paged.bench.cards.card import needed
from paged.bench.cards.cards import CARDS
from paged.bench.problems.arguments import Arguments
from paged.bench.traces import references
from paged.bench.traces.schema import Definition, Inputs, Spec
from paged.errors import InvalidInputError, UnsupportedError


class Translation(ABC):
    """Definitions of one operation. operation: its name. op_type: that of definitions."""

    operation: str
    op_type: str

    @abstractmethod
    def takes(self, definition: Definition) -> bool:
        """Return whether a definition of op_type means the operation."""

    @abstractmethod
    def arguments(self, definition: Definition, inputs: Inputs) -> Arguments:
        """Return the operation's arguments for a definition's inputs.

        Raises:
            InvalidInputError: the inputs are no call.
        """

    @abstractmethod
    def inputs(self, definition: Definition, arguments: Arguments) -> Inputs:
        """Return a definition's inputs for the operation's arguments."""

    @abstractmethod
    def returned(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return what the operation returns for a definition's outputs."""

    @abstractmethod
    def define(self, arguments: Arguments) -> Definition:
        """Return the definition of a call.

        Raises:
            UnsupportedError: no definition has the call's options.
        """


class _Norm(Translation):
    operation, op_type = "rms_norm", "rmsnorm"

    def takes(self, definition: Definition) -> bool:
        return list(definition.inputs) == ["hidden_states", "weight"] and len(definition.outputs) == 1

    def arguments(self, definition: Definition, inputs: Inputs) -> Arguments:
        return {"x": inputs["hidden_states"], "weight": inputs["weight"], "eps": _eps(definition)}

    def inputs(self, definition: Definition, arguments: Arguments) -> Inputs:
        return {"hidden_states": arguments["x"], "weight": arguments["weight"]}

    def returned(self, outputs: Sequence[torch.Tensor]) -> Any:
        return outputs[0]

    def define(self, arguments: Arguments) -> Definition:
        x, weight, eps = arguments["x"], arguments["weight"], arguments.get("eps", 1e-6)
        if x.dim() != 2:
            raise UnsupportedError(f"x: {x.dim()} dimensions, expected 2")
        size = x.shape[1]
        rows = Spec(("batch_size", "hidden_size"), _dtype_name(x))
        name = f"rmsnorm_h{size}{_suffix(x)}"
        if eps != 1e-6:
            name += f"_eps{eps:g}"
        return Definition(
            name,
            self.op_type,
            {"batch_size": None, "hidden_size": size},
            {"hidden_states": rows, "weight": Spec(("hidden_size",), _dtype_name(weight))},
            {"output": rows},
            references.NORM.format(eps=eps),
            f"RMS normalisation of {size} numbers, eps {eps:g}.",
        )


class _Attention(Translation):
    operation, op_type = "paged_attention", "gqa_paged"

    def takes(self, definition: Definition) -> bool:
        names = set(definition.inputs)
        if "qo_indptr" in names and "causal" not in definition.name:
            return False
        required = {"q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "sm_scale"}
        is_known = names - {"qo_indptr", "kv_last_page_len"} == required
        return is_known and list(definition.outputs) in (["output"], ["output", "lse"])

    def arguments(self, definition: Definition, inputs: Inputs) -> Arguments:
        q, k_cache = inputs["q"], inputs["k_cache"]
        offsets, page_ids = inputs["kv_indptr"].long(), inputs["kv_indices"]
        num_pages = offsets.diff()  # [num_seqs]
        page_size = k_cache.shape[1]
        if len(offsets) < 1 or offsets[0] != 0 or (num_pages < 0).any() or offsets[-1] > len(page_ids):
            raise InvalidInputError("kv_indptr: expected growing offsets into kv_indices that begin with 0")
        page_ids = page_ids[: offsets[-1]]
        if ((page_ids < 0) | (page_ids >= len(k_cache))).any():
            raise InvalidInputError(f"kv_indices: expected pages below {len(k_cache)}")
        seq_lens = num_pages * page_size
        if "kv_last_page_len" in inputs:
            last = inputs["kv_last_page_len"].long()
            if ((last < 1) | (last > page_size))[num_pages > 0].any():
                raise InvalidInputError(f"kv_last_page_len: expected 1 to {page_size}")
            seq_lens = (seq_lens - page_size + last) * (num_pages > 0)
        is_used = torch.arange(max(num_pages.tolist(), default=0), device=q.device) < num_pages[:, None]
        block_table = torch.zeros(is_used.shape, dtype=torch.int32, device=q.device)
        block_table[is_used] = page_ids.int()
        query_offsets = inputs.get("qo_indptr")
        if query_offsets is None:
            query_offsets = torch.arange(len(q) + 1, device=q.device)
        if len(query_offsets) != len(offsets) or query_offsets[0] != 0 or query_offsets[-1] != len(q):
            raise InvalidInputError(f"qo_indptr: expected {len(offsets)} offsets from 0 to {len(q)}, or as many rows")
        return {
            "q": q,
            "k_cache": k_cache,
            "v_cache": inputs["v_cache"],
            "block_table": block_table,
            "cu_seqlens_q": query_offsets.int(),
            "seq_lens": seq_lens.int(),
            "max_seqlen_q": max(query_offsets.diff().tolist(), default=0),
            "softmax_scale": float(inputs["sm_scale"]),
            "return_lse": len(definition.outputs) == 2,
        }

    def inputs(self, definition: Definition, arguments: Arguments) -> Inputs:
        q, k_cache, table = arguments["q"], arguments["k_cache"], arguments["block_table"]
        page_size = k_cache.shape[1]
        seq_lens = arguments["seq_lens"].long()
        num_pages = -(-seq_lens // page_size)
        is_used = torch.arange(table.shape[1], device=table.device) < num_pages[:, None]
        scale = arguments.get("softmax_scale")
        if scale is None:
            scale = q.shape[2] ** -0.5
        values = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": arguments["v_cache"],
            "qo_indptr": arguments["cu_seqlens_q"],
            "kv_indptr": torch.nn.functional.pad(num_pages.cumsum(0), (1, 0)).int(),
            "kv_indices": table[is_used],
            "kv_last_page_len": (seq_lens - (num_pages - 1) * page_size).int(),
            "sm_scale": scale,
        }
        return {name: values[name] for name in definition.inputs}

    def returned(self, outputs: Sequence[torch.Tensor]) -> Any:
        if len(outputs) == 1:
            return outputs[0]
        lse = outputs[1].double().mul(math.log(2)).float()  # [num_tokens, num_q_heads], natural
        return outputs[0], lse.T.contiguous()

    def define(self, arguments: Arguments) -> Definition:
        options = set(needed(CARDS[self.operation], arguments)) - {
            "q", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seq_lens", "softmax_scale",
        }  # fmt: skip
        if options:
            raise UnsupportedError(f"no definition has {', '.join(sorted(options))}")
        q, k_cache = arguments["q"], arguments["k_cache"]
        num_q_heads, head_dim = q.shape[1:]
        _, page_size, num_kv_heads, _ = k_cache.shape
        if k_cache.dtype != q.dtype or arguments["v_cache"].shape != k_cache.shape:
            raise UnsupportedError("no definition has caches of another dtype, or values of another size")
        query_lens = arguments["cu_seqlens_q"].diff()
        is_decode = len(q) == len(query_lens) and bool((query_lens == 1).all())
        rows, kind, query_offsets = "total_q", "prefill_causal", "qo_indptr.tolist()"
        if is_decode:
            rows, kind, query_offsets = "batch_size", "decode", "list(range(len(q) + 1))"
        axes = {
            rows: None,
            "num_qo_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "num_pages": None,
            "page_size": page_size,
            "len_indptr": None,
            "num_kv_indices": None,
        }
        dtype = _dtype_name(q)
        out = Spec((rows, "num_qo_heads", "head_dim"), dtype)
        cache = Spec(("num_pages", "page_size", "num_kv_heads", "head_dim"), dtype)
        inputs = {"q": out, "k_cache": cache, "v_cache": cache}
        if not is_decode:
            inputs["qo_indptr"] = Spec(("len_indptr",), "int32")
        inputs |= {"kv_indptr": Spec(("len_indptr",), "int32"), "kv_indices": Spec(("num_kv_indices",), "int32")}
        last_lens = "[1] * (len(kv_indptr) - 1)"
        if page_size > 1:
            last_lens = "kv_last_page_len.tolist()"
            axes["num_seqs"] = None
            inputs["kv_last_page_len"] = Spec(("num_seqs",), "int32")
        inputs["sm_scale"] = Spec(None, "float32")
        reference = references.ATTENTION.format(
            signature=", ".join(inputs), query_offsets=query_offsets, last_lens=last_lens
        )
        return Definition(
            f"gqa_paged_{kind}_h{num_q_heads}_kv{num_kv_heads}_d{head_dim}_ps{page_size}{_suffix(q)}",
            self.op_type,
            axes,
            inputs,
            {"output": out, "lse": Spec((rows, "num_qo_heads"), "float32")},
            reference,
            "Attention over pages of keys and values; the log-sum-exp has base 2.",
            ("num_kv_indices == kv_indptr[-1].item()",),
        )


TRANSLATIONS: tuple[Translation, ...] = (_Norm(), _Attention())


def translation_of(definition: Definition) -> Translation:
    """Return the translation that takes a definition.

    Raises:
        UnsupportedError: there is none.
    """
    for translation in TRANSLATIONS:
        if definition.op_type == translation.op_type and translation.takes(definition):
            return translation
    raise UnsupportedError(
        f"{definition.name}: no operation for op_type {definition.op_type} with {', '.join(definition.inputs)} -> "
        f"{', '.join(definition.outputs)}"
    )


def _eps(definition: Definition) -> float:
    """Return the constant EPS of the reference, which is no input in the format."""
    try:
        nodes = list(ast.walk(ast.parse(definition.reference)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"{definition.name}: its reference is no Python: {error}") from error
    for node in nodes:
        target = None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        if isinstance(target, ast.Name) and target.id == "EPS":
            value = node.value  # type: ignore[attr-defined]
            if isinstance(value, ast.Constant) and isinstance(value.value, float):
                return value.value
            raise UnsupportedError(f"{definition.name}: its reference computes EPS, expected a constant")
    raise UnsupportedError(f"{definition.name}: its reference has no constant EPS")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _suffix(tensor: torch.Tensor) -> str:
    """Names without a dtype mean bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return ""
    return f"_{_dtype_name(tensor)}"
