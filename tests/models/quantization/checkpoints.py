"""A tiny Llama in every format, and the same weights unpacked."""

import json
import shutil
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paged.kernels.cpu.quantization.packed_product import CpuProduct
from paged.kernels.lora.batch import LoraBatch
from paged.kernels.quantization import definition
from paged.models.layers.latent_attention import LatentAttention
from paged.models.layers.modules import Linear
from paged.models.paged_lm import PagedCausalLM
from paged.models.quantization.packed_weights import PackedWeights
from paged.models.registry import load_model
from tests.models.edits import WEIGHTS, edit_config, edit_tensors
from tests.models.families import tokens
from tests.models.quantization.compressor import compress
from tests.models.quantization.packers import FORMATS, rounded
from tests.tolerance import assert_rounded_alike, assert_within

PROMPT = tokens(9)
LAYER = "model.layers.0."


@dataclass(frozen=True)
class Folders:
    """The same model packed and plain."""

    name: str
    packed: Path
    plain: Path

    def tensor(self, name: str) -> torch.Tensor:
        """One of the layer of the packed one."""
        return load_file(self.packed / WEIGHTS)[LAYER + name]

    def edit(self, name: str, tensor: torch.Tensor | None) -> None:
        """Replace one of those, or take it away."""
        changed = {LAYER + name: tensor}
        edit_tensors(self.packed, lambda t: t.pop(LAYER + name) if tensor is None else t.update(changed))

    def configure(self, **changes: Any) -> None:
        """Change the packed one's quantization_config."""
        config = json.loads((self.packed / "config.json").read_text()).get("quantization_config", {})
        edit_config(self.packed, quantization_config=config | changes)


def write(name: str, base: Path, folder: Path) -> Folders:
    """Every projection of `base` in the format, beside a model with what that stands for."""
    torch.manual_seed(zlib.crc32(name.encode()))
    folders = Folders(name, folder / "packed", folder / "plain")
    for path in (folders.packed, folders.plain):
        path.mkdir()
        shutil.copy(base / "config.json", path)
    make, plain = FORMATS[name].make, load_file(base / WEIGHTS)
    if make is None:
        plain |= compress(plain, FORMATS[name].config, folders.packed)
    else:
        packed = dict(plain)
        ends = (
            "_proj.weight",
            "_proj_with_mqa.weight",
            "in_proj_qkvz.weight",
            *(["lm_head.weight"] * bool(FORMATS[name].config.get("lm_head"))),
        )
        for path in [key.removesuffix("weight") for key in plain if key.endswith(ends)]:
            made, numbers = make(*packed.pop(f"{path}weight").shape)
            packed |= {path + end: tensor.contiguous() for end, tensor in made.items()}
            plain[f"{path}weight"] = numbers.float()
        save_file(packed, folders.packed / WEIGHTS)
        folders.configure(**FORMATS[name].config)
    save_file(plain, folders.plain / WEIGHTS)
    return folders


def load(folder: Path, **options: Any) -> PagedCausalLM:
    return load_model(folder, block_size=8, num_blocks=16, **options)


def packed_weights(model: PagedCausalLM) -> dict[str, PackedWeights]:
    """By the paths of their layers."""
    modules = model.network.named_modules()
    return {path.removesuffix(".packed"): module for path, module in modules if isinstance(module, PackedWeights)}


def _rounding(model: PagedCausalLM, how: str, paths: Collection[str]) -> PagedCausalLM:
    """A plain model of which the layers at `paths` round their input."""
    for path, module in model.network.named_modules():
        if isinstance(module, Linear) and path in paths:

            def forward(x: torch.Tensor, lora: LoraBatch | None = None, linear: Linear = module) -> torch.Tensor:
                return Linear.forward(linear, rounded(x, how), lora)

            module.forward = forward  # type: ignore[method-assign]
    return model


def assert_as_unpacked(
    folders: Folders, before_rounding: Callable[[], object] = int, *, is_repacked: bool = False
) -> PagedCausalLM:
    """The packed model has the numbers of the unpacked weights, and their logits, with activations rounded as the
    format has it.

    is_repacked: the weights are in the order of a CPU's products. That of int4 takes bfloat16, which random zero points
        as these, of weights that are far from 0, magnify; `test_packed_product` is stricter.
    """
    has_int4 = False
    packed = load(folders.packed)
    paths = packed_weights(packed).keys()
    if is_repacked:
        packed.network.pack()
        assert not packed_weights(packed)
        products = [one for module in packed.network.modules() for one in getattr(module, "products", None) or ()]
        for product in products:
            if isinstance(product, CpuProduct) and product.form == "int4" and product.kind != "unpacked":
                has_int4 = True
    else:
        _assert_same_weights(packed, load(folders.plain))
    got = packed.prefill("a", PROMPT)
    plain = load(folders.plain).prefill("a", PROMPT)
    how = FORMATS[folders.name].rounds
    if how:
        before_rounding()
        want = _rounding(load(folders.plain), how, paths).prefill("a", PROMPT)
        assert_rounded_alike(got, want, plain)
    elif has_int4:
        assert_within((got - plain).norm(), 0.0, 0.3 * plain.norm())
    else:
        assert_within(got, plain, 1e-4 * plain.abs().max())
    return packed


def _assert_same_weights(packed: PagedCausalLM, plain: PagedCausalLM) -> None:
    """What the codes of projections stand for, of those that are no experts, and the matrices of latent attention."""
    linears = dict(plain.network.named_modules())
    for path, module in packed.network.named_modules():
        if isinstance(module, LatentAttention):
            matrices = linears[path].up
            assert_within(module.up, matrices, 1e-6 * matrices.abs().max())
    for path, weights in packed_weights(packed).items():
        linear = linears.get(path)
        is_sorted = path.endswith("linear_attn.in_proj")  # its plain rows are in another order than stored
        if isinstance(linear, Linear) and not is_sorted:
            for rows, weight in weights.runs:
                expected = linear.weight[rows].double()
                if weight.input_order is not None:
                    expected = expected[:, weight.input_order.long()]
                numbers = definition.dequantize(weight)
                assert_within(numbers, expected, 1e-6 * expected.abs().max())
