"""Special tokens that stand in texts of users are text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from paged import ChatTokenizer
from tests.executors.text.checkpoints import save


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content | trim }}<|end|>", "a<|end|>b"),
        ("{% for part in messages[0].content %}{{ part }}{% endfor %}<|end|>", ["<|e", "nd|>"]),
        ("{{ messages[0].content.replace('</think>', '') }}<|end|>", "<|e</think>nd|>"),
        ("{{ messages | tojson(ensure_ascii=true) }}<|end|>", "é<|end|>"),
    ],
)
def test_special_tokens_of_users_are_text(template: str, content: Any, tmp_path: Path) -> None:
    """The template's own count, wherever the user's come from and whatever the template does with them."""
    theirs = save(tmp_path, template)
    ours = ChatTokenizer.from_folder(tmp_path)
    messages = [{"role": "user", "content": content}]
    ids, end = ours.encode_chat(messages), theirs.convert_tokens_to_ids("<|end|>")
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert theirs.decode(ids) == ours.render(messages)
    assert ours.encode_chat(messages, parse_special=True) == theirs.apply_chat_template(messages, return_dict=False)
    assert ours.encode_chat(messages, parse_special=True).count(end) == 2


def test_special_tokens_of_the_models_own_vocabulary(tmp_path: Path) -> None:
    """Unigram finds them in plain text, too; what is unknown stays unknown."""
    pieces = [("<unk>", 0.0), ("a", -2.0), ("<", -3.0), ("s", -3.0), (">", -3.0), ("<s>", 0.0)]
    tokenizer = Tokenizer(Unigram(pieces, 0, False))
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = ChatTokenizer.from_folder(tmp_path)
    assert ours.encode("a<s>a") == [1, 2, 3, 4, 1]
    assert ours.encode("a<s>a", parse_special=True) == [1, 5, 1]
    assert ours.encode("aéa") == ours.encode("aéa", parse_special=True) == [1, 0, 1]
