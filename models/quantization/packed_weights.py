"""Packed weights of projections that run as one product, and of experts stored in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from paged.errors import InvalidInputError, UnsupportedError
from paged.kernels.cpu.products import cpu_of_experts
from paged.kernels.cpu.quantization.experts import ExpertProducts
from paged.kernels.cpu.quantization.packed_product import CpuProduct, is_plain, unpacked
from paged.kernels.quantization.definition import dequantize
from paged.kernels.quantization.gemm import row_counts
from paged.kernels.quantization.packing import E2M1_GROUPS, FP8_BLOCK, MXFP4_GROUP, num_words, pack_codes, unpack_pairs
from paged.kernels.quantization.quantized_linear import quantized_linear
from paged.kernels.quantization.weight import QuantizedWeight
from paged.models.loading.weights import ConvertedDestination, Destinations, PackedModule, without_ones
from paged.models.quantization.layouts import Layout, Widened

# Number of codes that loading unpacks at once. The limit bounds memory, because each code temporarily takes 15 bytes.
_MOST_CODES = 1 << 22
_VALUES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_SCALES = {"e4m3": torch.float32, "mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}


class PackedWeights(PackedModule):
    """Codes and scales of several projections, in one tensor each.

    runs: rows and their weights, one product each. There is one run if all projections share input order, input scale
    and tensor scale, and only the last projection ends within a block of 128 rows.
    """

    runs: tuple[tuple[slice, QuantizedWeight], ...]

    def __init__(self, layout: Layout, in_features: int, sizes: Sequence[int]) -> None:
        """Allocate the tensors; sizes: output features of each projection."""
        super().__init__()
        self.layout, self.in_features, self.sizes = layout, in_features, tuple(sizes)
        rows, scale_rows = sum(sizes), sum(map(layout.scale_rows, sizes))
        code = _VALUES.get(layout.form, torch.int32)
        columns = num_words(in_features) if code == torch.int32 else in_features
        groups = layout.num_groups(in_features)
        is_flat = groups == 1 and not (layout.in_blocks or layout.form in E2M1_GROUPS)
        # A step reads the scales of many rows for one group, so rows are the last dimension.
        scales = (scale_rows,) if is_flat else (groups, scale_rows)
        self.values = _parameter((rows, columns), code)
        self.scale = _parameter(scales, _SCALES.get(layout.form, layout.scale_dtype))
        self.zero_point = _parameter(scales, torch.int8) if layout.has_zero_points else None
        self.tensor_scale = _parameter((len(sizes),), torch.float32) if layout.has_tensor_scale else None
        self.input_scale = _parameter((len(sizes),), torch.float32) if layout.has_input_scale else None
        self.input_order = _parameter((len(sizes), in_features), torch.int32) if layout.has_order else None

    def derive_from_weights(self) -> None:
        """Compute the runs; call it when the weights are at their final addresses."""
        runs: list[tuple[slice, QuantizedWeight]] = []
        start, num_parts = 0, len(self.sizes)
        for end in range(1, num_parts + 1):
            if end == num_parts or not self._continues(start, end):
                runs.append((self._rows(start, end), self._weight(start, end)))
                start = end
        self.runs = tuple(runs)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x [num_rows, in_features] times the weights, plus the bias [out_features]."""
        if len(self.runs) == 1:
            return quantized_linear(x, self.runs[0][1], bias=bias)
        out = x.new_empty(len(x), len(self.values))
        for rows, weight in self.runs:
            quantized_linear(x, weight, bias=_part(bias, rows), out=out[:, rows])
        return out

    def for_cpu(self, dtype: torch.dtype) -> CpuProducts | torch.Tensor:
        """Return the form that a CPU multiplies fastest: products, or plain weights in `dtype`."""
        weights = [weight for _, weight in self.runs]
        plain = _plain(weights, dtype)
        if plain is not None:
            return torch.cat(plain)
        return CpuProducts([CpuProduct(weight, dtype) for weight in weights], self.num_weights())

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [out_features, in_features] that the codes stand for, rounded once."""
        parts: list[torch.Tensor] = []
        for _, weight in self.runs:
            numbers = dequantize(weight, compute=torch.float32)
            if weight.input_order is not None:
                numbers = torch.empty_like(numbers).index_copy_(1, weight.input_order.long(), numbers)
            parts.append(numbers.to(dtype))
        return torch.cat(parts)

    def experts(self, count: int) -> list[QuantizedWeight]:
        """Return the weights of each of `count` experts. Each token has its own input scale, as in `fused_moe`."""
        step = len(self.sizes) // count
        weights: list[QuantizedWeight] = []
        for start in range(0, len(self.sizes), step):
            weights.append(replace(self._weight(start, start + step), input_scale=None))
        return weights

    def stacked(self, count: int) -> tuple[torch.Tensor, *tuple[torch.Tensor | None, ...]]:
        """Return weights, scales, zero points and tensor scales of `count` experts in `fused_moe`'s layout.

        Raises:
            UnsupportedError: the projections of an expert have different tensor scales.
        """
        tensor_scale: torch.Tensor | None = self.tensor_scale
        if tensor_scale is not None:
            scales = tensor_scale.view(count, -1)
            if (scales != scales[:, :1]).any():
                raise UnsupportedError("experts: gate and up have different tensor scales, expected the same")
            tensor_scale = scales[:, 0].contiguous()
        zeros: torch.Tensor | None = None
        if self.zero_point is not None:
            zeros = _by_rows(self.zero_point).unflatten(0, (count, -1))
        scale = _by_rows(self.scale).unflatten(0, (count, -1))
        return self.values.unflatten(0, (count, -1)), scale, zeros, tensor_scale

    def row_counts(self, limit: int, dtype: torch.dtype) -> list[int]:
        """Return, for each code path up to `limit` rows, its least number of rows."""
        counts: set[int] = set()
        for _, weight in self.runs:
            counts.update(row_counts(limit, weight, dtype))
        return sorted(counts)

    def destinations(self, names: Sequence[str]) -> Destinations:
        """Return the destinations for the tensors of these projections."""
        destinations: Destinations = {}
        for part, (name, rows) in enumerate(zip(names, self.sizes, strict=True)):
            projection = _Projection(self.layout, rows, self.in_features, self._weight(part, part + 1))
            for end, destination in projection.destinations().items():
                destinations[f"{name}.{end}"] = destination
        return destinations

    def _continues(self, first: int, part: int) -> bool:
        """Return whether a projection belongs to the run that begins with `first`."""
        rows = self._rows(first, part)
        if self.layout.in_blocks and (rows.stop - rows.start) % FP8_BLOCK:
            return False
        for values in (self.tensor_scale, self.input_scale, self.input_order):
            if values is not None and not torch.equal(values[first], values[part]):
                return False
        return True

    def _rows(self, start: int, end: int, count: Callable[[int], int] = int) -> slice:
        sizes = list(map(count, self.sizes))
        return slice(sum(sizes[:start]), sum(sizes[:end]))

    def _weight(self, start: int, end: int) -> QuantizedWeight:
        """Return projections `start` to `end` as one weight, with the input order and scales of the first."""
        scale_rows = self._rows(start, end, self.layout.scale_rows)
        zero_point: torch.Tensor | None = None
        if self.zero_point is not None:
            zero_point = _by_rows(self.zero_point)[scale_rows]
        return QuantizedWeight(
            self.values[self._rows(start, end)],
            _by_rows(self.scale)[scale_rows],
            self.in_features,
            zero_point,
            _part(self.tensor_scale, start),
            self.layout.quantizes_input,
            _part(self.input_scale, start),
            _part(self.input_order, start),
        )


class CpuProducts(PackedModule):
    """Packed weights of several projections in the order of a CPU's products."""

    def __init__(self, products: Sequence[CpuProduct], num_weights: int) -> None:
        super().__init__()
        self.products, self._num_weights = tuple(products), num_weights

    def num_weights(self) -> int:
        return self._num_weights

    def weight_tensors(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for product in self.products:
            tensors += product.tensors
        return tensors

    @property
    def has_invariant_rows(self) -> bool:
        """Whether a row's bits never depend on other rows, in a forward that asks for this."""
        return all(product.has_invariant_rows for product in self.products)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x [num_rows, in_features] times the weights, plus the bias [out_features]."""
        if len(self.products) == 1:
            return self.products[0](x, bias)
        columns: list[torch.Tensor] = []
        start = 0
        for product in self.products:
            end = start + product.rows
            columns.append(product(x, _part(bias, slice(start, end))))
            start = end
        return torch.cat(columns, 1)


class CpuExperts(CpuProducts):
    """Packed weights of one projection of all experts in the order of a CPU's products; called as `multiply`."""

    def __init__(self, weights: Iterable[QuantizedWeight], dtype: torch.dtype) -> None:
        """dtype: dtype of activations."""
        products: list[CpuProduct] = []
        num_weights = 0
        for weight in weights:
            product = CpuProduct(weight, dtype, cpu_of_experts(weight.out_features, dtype))
            products.append(product)
            num_weights += product.rows * product.columns
        super().__init__(products, num_weights)
        self.multiply = ExpertProducts(products, products[0].rows)


def widening(layout: Widened, weight: torch.Tensor) -> Destinations:
    """Return destinations by the ends of names; the last tensor to arrive fills plain `weight` [rows, columns]."""
    stored = layout.stored(*weight.shape)
    tensors: dict[str, torch.Tensor] = {}

    def take(end: str, tensor: torch.Tensor) -> None:
        tensors[end] = tensor
        if len(tensors) == len(stored):
            weight.copy_(layout.numbers(tensors))
            tensors.clear()

    destinations: Destinations = {}
    for end, tensor in stored.items():
        destinations[end] = ConvertedDestination(torch.Size(tensor.shape), tensor.dtype, partial(take, end))
    return destinations


def experts_for_cpu(weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> CpuExperts | torch.Tensor:
    """Return experts in the form that a CPU multiplies fastest: products, or plain [num_experts, rows, columns]."""
    plain = _plain(weights, dtype)
    if plain is not None:
        return torch.stack(plain)
    return CpuExperts(weights, dtype)


def _plain(weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> list[torch.Tensor] | None:
    """Return the unpacked weights if a CPU multiplies all of them faster than codes, else None."""
    if not all(is_plain(weight, dtype) for weight in weights):
        return None
    return [unpacked(weight, dtype) for weight in weights]


def _part(values: torch.Tensor | None, index: int | slice) -> torch.Tensor | None:
    """Return a part of an optional tensor."""
    if values is None:
        return None
    return values[index]


def _by_rows(scale: torch.Tensor) -> torch.Tensor:
    if scale.dim() == 2:
        return scale.T
    return scale


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class _Projection:
    """Collects a projection's tensors and packs them when complete."""

    def __init__(self, layout: Layout, rows: int, columns: int, weight: QuantizedWeight) -> None:
        self.layout, self.rows, self.weight = layout, rows, weight
        self.stored = layout.stored(rows, columns)
        self.found: dict[str, torch.Tensor] = {}

    def destinations(self) -> Destinations:
        destinations: Destinations = {}
        for end, tensor in self.stored.items():
            shape = torch.Size(without_ones(tensor.shape))
            destinations[end] = ConvertedDestination(shape, tensor.dtype, partial(self._take, end), is_loose=True)
        return destinations

    def _take(self, end: str, tensor: torch.Tensor) -> None:
        self.found[end] = tensor.reshape(self.stored[end].shape)
        if len(self.found) == len(self.stored):
            step = max(_MOST_CODES // self.weight.in_features // FP8_BLOCK, 1) * FP8_BLOCK
            if self.layout.form == "mxfp4" and self.layout.has_tensor_scale:  # one scale of all rows is the largest
                step = self.rows
            for start in range(0, self.rows, step):
                self._pack(start, min(start + step, self.rows))
            self.found.clear()

    def _pack(self, start: int, end: int) -> None:
        """Fill rows `start` to `end`; their device unpacks them."""
        weight, layout = self.weight, self.layout
        rows_of_tensors: dict[str, torch.Tensor] = {}
        for name in self.found:
            rows_of_tensors[name] = self._rows_of(name, start, end).to(weight.values.device)
        packed = layout.pack(rows_of_tensors, weight.in_features)
        weight.values[start:end].copy_(packed.values)
        scales = slice(layout.scale_rows(start), layout.scale_rows(end))
        for mine, theirs in ((weight.scale, packed.scale), (weight.zero_point, packed.zero_point)):
            if mine is not None and theirs is not None:
                mine[scales].copy_(theirs)
        for mine, theirs in ((weight.tensor_scale, packed.tensor_scale), (weight.input_scale, packed.input_scale)):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
        if weight.input_order is not None:
            order = packed.input_order
            if order is None:
                order = torch.arange(weight.in_features, dtype=torch.int32, device=weight.values.device)
            weight.input_order.copy_(order)
        elif packed.input_order is not None:
            raise InvalidInputError("g_idx: columns in their own order, expected consecutive groups")

    def _rows_of(self, name: str, start: int, end: int) -> torch.Tensor:
        stored, tensor = self.stored[name], self.found[name]
        if stored.row_dim is None:
            return tensor
        first, last = start // stored.rows_each, -(-end // stored.rows_each)
        return tensor.narrow(stored.row_dim, first, last - first)


class UnpackedProjection(_Projection):
    """Collects the tensors of a projection in a checkpoint, and writes their numbers to plain weights when complete."""

    def __init__(self, layout: Layout, plain: torch.Tensor) -> None:
        """plain: [rows, columns], the weights to fill."""
        self.layout, self.plain = layout, plain
        self.rows, columns = plain.shape
        self.stored = layout.stored(self.rows, columns)
        self.found: dict[str, torch.Tensor] = {}

    def _take(self, end: str, tensor: torch.Tensor) -> None:
        if len(self.found) + 1 < len(self.stored):
            super()._take(end, tensor)
            return
        # Pack only for this tensor: several at once would need the memory of all packed weights.
        packed = PackedWeights(self.layout, self.plain.shape[1], [self.rows]).to(self.plain.device)
        self.weight = packed._weight(0, 1)
        super()._take(end, tensor)
        del self.weight
        packed.derive_from_weights()
        self.plain.copy_(packed.dequantized(self.plain.dtype))


class Mxfp4Experts(PackedModule):
    """One projection of all experts in MXFP4 for `fused_moe`: the checkpoint's bits, reordered."""

    def __init__(self, num_experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        words, groups = (num_experts, out_features, num_words(in_features)), -(-in_features // MXFP4_GROUP)
        self.values = _parameter(words, torch.int32)
        # A step reads the exponents of many rows for one group, so rows are the last dimension.
        self.exponents = _parameter((num_experts, groups, out_features), torch.uint8)

    @property
    def scale(self) -> torch.Tensor:
        """Scales, [num_experts, out_features, in_features / 32]."""
        return self.exponents.mT

    def destinations(self, name: str) -> Destinations:
        """Return the destinations for the blocks and scales of this tensor."""
        # A byte holds two codes, the first in the low bits.
        shape = torch.Size((*self.scale.shape, MXFP4_GROUP // 2))
        return {f"{name}_blocks": ConvertedDestination(shape, torch.uint8, self._take), f"{name}_scales": self.scale}

    def experts(self) -> list[QuantizedWeight]:
        """Return the weights of each expert."""
        pairs = zip(self.values, self.scale, strict=True)
        return [QuantizedWeight(values, scale, self.in_features) for values, scale in pairs]

    def _take(self, blocks: torch.Tensor) -> None:
        # Sort one expert at a time on the device, because sorting takes eight times the codes' memory.
        for mine, theirs in zip(self.values, blocks, strict=True):
            mine.copy_(pack_codes(unpack_pairs(theirs.to(mine.device).flatten(1))))
