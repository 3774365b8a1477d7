"""The gated activation between the two products of an MLP or an expert: activation(gate) * up."""

from __future__ import annotations

from .compat import tl, triton
from .errors import InvalidInputError, UnsupportedError
from .scalars import shown

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_oai")
# Of experts without a gate: the square of what is positive (So et al., 2021).
PLAIN_ACTIVATIONS = ("relu2",)


@triton.jit
def gated_activation(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up in float32; a NaN of either half stays one."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    if ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    if ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(z)) = 1 / (1 + exp(-2 z)) with z = sqrt(2 / pi) (gate + 0.044715 gate^3).
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    # "swiglu_oai", of gpt-oss (OpenAI, 2025): both halves clamped at 7, and one added to the half that is not the gate.
    # Comparisons, as minimum and maximum would drop a NaN.
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


def check_activation(activation: str, known: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise UnsupportedError unless the activation is known."""
    if not isinstance(activation, str):
        raise InvalidInputError(f"activation: {shown(activation)}, expected a name")
    if activation not in known:
        raise UnsupportedError(f"activation: {activation!r}, known are {', '.join(map(repr, known))}")
