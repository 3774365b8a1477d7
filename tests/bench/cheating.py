"""RMS norms, and a write to a cache, that look right to a judge that trusts them."""

import atexit
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import paged

_earlier: dict[Any, torch.Tensor] = {}
_calls: list[int] = []


def right(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def clears_x(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    out = right(x, weight, eps)
    x.zero_()
    return out


def nudges_x(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """By one bit."""
    out = right(x, weight, eps)
    x[-1, -1] = x[-1, -1].nextafter(torch.tensor(9.0))
    return out


def ruins_weights(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    out = right(x, weight, eps)
    weight.fill_(torch.nan)
    return out


def returns_x(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x.copy_(right(x, weight, eps))


def shrinks_x(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    out = right(x, weight, eps)
    x.resize_(0)
    return out


def remembers(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return _earlier.setdefault((x.shape, x.dtype), right(x, weight, eps)).clone()


def reuses_its_result(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return _earlier.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(right(x, weight, eps))


def is_right_at_first(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    _calls.append(1)
    return right(x, weight, eps) * (1 + 0.01 * (len(_calls) % 2 == 0))


def exits(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    print("9 of 9 right, by torch on cpu")
    sys.exit(0)


def ends_at_once(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    atexit.register(os._exit, 0)
    os._exit(0)


def crashes(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    os.abort()


def forks(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    os.fork()
    return right(x, weight, eps)


def breaks_a_pipe(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    raise BrokenPipeError


def interrupts(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    raise KeyboardInterrupt


def hangs(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    while True:
        pass


def patches_the_judge(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    from paged.bench import check

    torch.allclose = torch.equal = lambda *_, **__: True
    check.Result.shares = lambda _: torch.zeros(1)
    return x + 1


def answers_itself(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    answer = {"number": 1, "error": None, "shared": [], "is_reused": False}
    os.write(int(sys.argv[1]), json.dumps(answer).encode() + b"\n")
    return x + 1


def answers_with_numbers(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    answer = {"number": 1, "error": None, "shared": [1], "is_reused": False}
    os.write(int(sys.argv[1]), json.dumps(answer).encode() + b"\n")
    return right(x, weight, eps)


def writes_after_its_answer(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """In the folder of the judge's files, as long as the process lives."""
    folder = Path(sys._getframe(1).f_locals["request"]["result"]).parent
    for number in itertools.count():
        (folder / str(number)).touch()
        if number == 3000:
            answers_with_numbers(x, weight)
    raise AssertionError


def reuses_its_lse(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first result in `out`, as it may."""
    out, lse = paged.paged_attention(**call)
    return out, _earlier.setdefault("lse", torch.empty_like(lse)).copy_(lse)


def forgets_its_lse(return_lse: bool = False, **call: Any) -> torch.Tensor:
    return paged.paged_attention(**call)


def forgets_its_ids(**call: Any) -> tuple[torch.Tensor]:
    return (paged.route_tokens(**call)[0],)


def counts_in_floats(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = paged.route_tokens(**call)
    return weights, ids.float()


def doubles_its_lse(**call: Any) -> Any:
    out, *lse = paged.paged_attention(**call)
    return (out, *(each.double() for each in lse))


def overwrites_the_cache(slot_mapping: torch.Tensor, **call: Any) -> None:
    """Also a slot that the call does not name."""
    paged.reshape_and_cache(slot_mapping=slot_mapping, **call)
    num_blocks, block_size = call["k_cache"].shape[:2]
    others = set(range(num_blocks * block_size)) - set(slot_mapping.tolist())
    call["k_cache"][min(others) // block_size, min(others) % block_size] = 0.5


def overwrites_what_it_reads(q: torch.Tensor, block_table: torch.Tensor, **call: Any) -> Any:
    out = paged.paged_attention(q=q, block_table=block_table, **call)
    call["k_cache"][block_table[0, 0], 0] += 1
    return out
