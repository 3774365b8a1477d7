"""The gated activation between the two products of an MLP or an expert: activation(gate) * up."""

from __future__ import annotations

from ..core.compat import tl, triton
from ..core.errors import InvalidInputError, UnsupportedError, shown

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "situ", "silu_10")
# For experts without a gate: max(up, 0)^2 (So et al., 2021).
PLAIN_ACTIVATIONS = ("relu2",)


@triton.jit
def _tanh(x):
    """tanh(x) with a relative error of a few float32 roundings. A NaN stays NaN."""
    # Near 0 the subtraction below cancels. There tanh(x) / x is a polynomial of x^2, fitted by least squares to a
    # relative error of 4e-9 for |x| < 0.5.
    square = x * x
    series = -0.006647474560619296
    series = series * square + 0.021297982889717935
    series = series * square - 0.053899188707332055
    series = series * square + 0.1333296424018533
    series = series * square - 0.33333326881566355
    size = tl.abs(x)
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * size))
    return tl.where(size < 0.5, x + x * square * series, tl.where(x < 0.0, -far, far))


@triton.jit
def gated_activation(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in float32. A NaN in either half stays NaN."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    if ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)) with z = sqrt(2 / pi) (gate + 0.044715 gate^3).
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    if ACTIVATION == "situ":
        # Kimi K3 (Moonshot AI, 2026).
        return 4.0 * _tanh(gate * 0.25) / (1.0 + tl.exp(-gate)) * (25.0 * _tanh(up * 0.04))
    if ACTIVATION == "silu_10":
        # GLM-5.3 (Z.ai, 2026). Comparisons keep a NaN.
        gate = tl.where(gate > 10.0, 10.0, gate)
        up = tl.where(up > 10.0, 10.0, tl.where(up < -10.0, -10.0, up))
        return gate / (1.0 + tl.exp(-gate)) * up
    # "swiglu_oai" of gpt-oss (OpenAI, 2025): clamp both halves at 7, and add 1 to `up`. Use comparisons, because
    # minimum and maximum would drop a NaN.
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


def check_activation(activation: str, known: tuple[str, ...]) -> None:
    """Raise UnsupportedError unless the activation is known."""
    if not isinstance(activation, str):
        raise InvalidInputError(f"activation: {shown(activation)}, expected a name")
    if activation not in known:
        raise UnsupportedError(f"activation: {activation!r}, known are {', '.join(map(repr, known))}")
