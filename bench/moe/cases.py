"""Cases of the MoE benchmark: published sizes of models, numbers of tokens, and the spread of tokens over experts."""

from __future__ import annotations

from paged.bench.problems.experts import MoeCase, MoeModel
from paged.bench.problems.formats import FORMATS, MXFP4, NVFP4, Format

ROUTINGS = ("balanced", "zipf")
# Numbers of tokens. Numbers with goals come first, in case the time budget runs out.
TOKENS = (1, 128, 16384, 32768, 16, 1024, 4, 256, 64, 4096, 2, 8, 32, 512, 2048, 8192)

MODELS = (
    MoeModel("Qwen3-30B-A3B", 128, 8, 2048, 768, 128),
    MoeModel("Mixtral-8x7B", 8, 2, 4096, 14336, 8),
    MoeModel("Qwen3-Next-80B-A3B", 512, 10, 2048, 512, 512),
    MoeModel("DeepSeek-V3-rank-of-8", 256, 8, 7168, 2048, 32),
)
# Numbers of tokens for the first model with quantised weights. GPTQ's and AWQ's checkpoints usually have groups of 128.
QUANTIZED_TOKENS = (1, 16384, 128, 16, 1024)
QUANTIZED_FORMATS = (
    FORMATS["e4m3 block"],
    FORMATS["e4m3 channel"],
    FORMATS["e4m3 tensor"],
    Format("int8", 1, 128),
    Format("int4", 1, 128),
    Format("int4", 1, 128, zeros=True, in_words=True),
    NVFP4,
)
# A model whose published experts are MXFP4.
GPT_OSS = MoeModel("gpt-oss-20b", 32, 4, 2880, 2880, 32)
# A model so small that a CPU can compare all its experts at full size.
CPU_MODEL = MoeModel("small-cpu", 16, 4, 256, 256, 16)


def _cases() -> tuple[MoeCase, ...]:
    """Return the cases by importance. The first three include a case of every model."""
    cases = [MoeCase(MODELS[0], num_tokens, "balanced") for num_tokens in TOKENS[:3]]
    for routing in ROUTINGS:
        for num_tokens in TOKENS:
            cases += [MoeCase(model, num_tokens, routing) for model in MODELS]
    for num_tokens in QUANTIZED_TOKENS:
        cases += [MoeCase(MODELS[0], num_tokens, "balanced", layout) for layout in QUANTIZED_FORMATS]
    cases += [MoeCase(GPT_OSS, num_tokens, "balanced", MXFP4) for num_tokens in QUANTIZED_TOKENS]
    return tuple(dict.fromkeys(cases))


CASES = _cases()
CPU_CASES = tuple(MoeCase(CPU_MODEL, 2**exponent, "balanced") for exponent in range(10))
