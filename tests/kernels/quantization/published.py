"""Codes as published layouts pack them, by their formulas."""

import torch

# What the codes 0 to 15 of MXFP4 and NVFP4 stand for.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def in_words(codes: torch.Tensor, num_bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words of 32 / num_bits codes of the last dimension each, place p holding code order[p], as a loop."""
    per_word = 32 // num_bits
    order = order or tuple(range(per_word))
    words = torch.zeros(*codes.shape[:-1], -(-codes.shape[-1] // per_word), dtype=torch.int64)
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    for word in range(words.shape[-1]):
        for place, offset in enumerate(order):
            words[..., word] += padded[..., word * per_word + offset] << (num_bits * place)
    return (words - (words >> 31 << 32)).int()


def in_bytes(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def nibbles(words: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the code of each column: nibble i of half h of word r of unit u, as in `packing`."""
    columns = torch.arange(num_columns)
    unit, inside = columns // 128, columns % 128
    i, r, half = inside // 32, inside % 32 // 2, inside % 2
    return (words[:, unit * 16 + r] >> (4 * i + 16 * half)) & 15
