"""Read a checkpoint's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from paged.errors import CheckpointError, InvalidInputError, PagedError, UnsupportedError
from paged.models.loading.checkpoint_files import read_text
from paged.models.loading.tokenizer_limits import excess
from paged.tools.printable import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")
# Limits of tokenizer.json in bytes and JSON values. The largest known file has 33 MB.
_MAX_BYTES, _MAX_VALUES = 64 << 20, 8_000_000
# A private character in place of a text that is one space, which would be stripped.
_SPACE = "\ue000"


def read_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer of a file.

    Raises:
        CheckpointError: the file is missing, unreadable or malformed, or its texts may grow beyond limits.
        UnsupportedError: the tokenizers package is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedError("texts need the tokenizers package: pip install 'paged[cli]'") from error
    text = read_text(file, _MAX_BYTES, _MAX_VALUES)

    def load() -> Tokenizer:
        # Check before loading, because loading runs the normalizer on the added tokens.
        if (reason := excess(json.loads(text))) is not None:
            raise CheckpointError(f"{file}: {reason}")
        tokenizer = Tokenizer.from_str(text)
        # Disable padding and truncation, like transformers: a file may pad texts to 10**12 tokens.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    return named(load, str(file), CheckpointError)


def named(call: Callable[[], T], name: str, kind: type[PagedError] = InvalidInputError) -> T:
    """Call the tokenizer, converting its errors.

    Raises:
        `kind`: the tokenizer raises or panics.
    """
    try:
        return call()
    except PagedError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is no `Exception`
        raise kind(f"{name}: the tokenizer fails ({type(error).__name__}: {one_line(error, 500)})") from error


def shared_ids(file: Path) -> list[int]:
    """Return an id for each token, which tokens share whose texts are equal but for case, accents and spaces.

    Ids count from 0, in the order of tokens. The rule is that of vLLM 0.33 for DeepSeek-V4.1.

    Raises:
        CheckpointError, UnsupportedError: as `read_tokenizer`.
    """
    tokenizer = read_tokenizer(file)
    from tokenizers import Regex, normalizers

    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )

    def ids() -> list[int]:
        ids_of_keys: dict[str, int] = {}
        shared: list[int] = []
        for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if "\ufffd" in text:  # a part of a character
                key = str(tokenizer.id_to_token(token_id))
            else:
                key = normalizer.normalize_str(text) or text
            shared.append(ids_of_keys.setdefault(key, len(ids_of_keys)))
        return shared

    return named(ids, str(file), CheckpointError)
