"""The kernels package under Hugging Face's `kernels`, beside `paged`: python -m tests.tools.hub_kernels FOLDER.

Prints the operations whose results lie within the bounds of their cards.
"""

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import kernels  # noqa: TID251  # Hugging Face's
import paged
from paged.bench.cards.card import Card
from paged.bench.cards.cards import CARDS
from paged.bench.cards.draw import Draw
from paged.bench.problems.arguments import Arguments


def main() -> None:
    folder = Path(sys.argv[1])
    package = kernels.get_local_kernel(folder, backend="cpu")
    for name, card in CARDS.items():
        assert getattr(package, name) is not getattr(paged, name)
        check(package, card)
        print(name)
    check_layers(folder)


def check(package: ModuleType, card: Card) -> None:
    """Compare an operation of the package with the definition, on a small problem."""
    torch.manual_seed(0)
    sizes = {size: values[-1] for size, values in card.odd.items()}
    arguments = card.draw(Draw(torch.device("cpu"), torch.float32), **sizes)
    want = card.want(arguments)
    bounds = card.bounds(arguments, want)
    got = card.call(arguments, lambda **named: getattr(package, card.name)(**of_package(package, named)))
    results = card.beside(arguments, got, want, bounds)
    assert results
    for result in results.values():
        result.check()


def of_package(package: ModuleType, arguments: Arguments) -> Arguments:
    """Return the arguments with objects of the package's classes, and without a plan."""
    converted: dict[str, Any] = {}
    for name, value in arguments.items():
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            converted[name] = getattr(package, type(value).__name__)(**fields)
        elif name not in ("plan", "prefix_plan"):
            converted[name] = value
    return converted


def check_layers(folder: Path) -> None:
    """Give the package's layer to a model's norm through the library."""
    norm = LlamaRMSNorm(64).requires_grad_(False)
    norm.weight.normal_()
    x = torch.randn(3, 5, 64)
    want = norm(x)
    type(norm).kernel_layer_name = "RMSNorm"
    layer = kernels.LocalLayerRepository(folder, layer_name="RMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": layer}}):
        norm = kernels.kernelize(norm, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
    assert norm.forward.__func__.__module__.startswith("paged_cpu_")
    torch.testing.assert_close(norm(x), want)


if __name__ == "__main__":
    main()
