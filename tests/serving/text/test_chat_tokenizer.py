"""Conversations give the text and the token ids that transformers makes of them, for templates in several styles."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import Unigram

from paged import ChatTokenizer, CheckpointError
from tests.serving.text.checkpoints import CONVERSATIONS, TOOL, USER, chat_tokenizer, edit, save


@pytest.mark.parametrize(("template", "messages", "options"), CONVERSATIONS)
def test_same_text_and_ids_as_transformers(
    template: str, messages: list[Any], options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = save(tmp_path, template)
    ours = ChatTokenizer.from_folder(tmp_path)
    assert ours.has_chat_template
    for prompted, tools in product((True, False), (None, [TOOL])):
        options = options | {"add_generation_prompt": prompted, "tools": tools}
        text = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.render(messages, **options) == text
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        assert ours.encode_chat(messages, **options) == ids
        assert ours.encode(text, parse_special=True) == theirs.encode(text) == [theirs.bos_token_id, *ids]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


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
    assert (ids.count(end), ids[-1]) == (1, end)
    assert theirs.decode(ids) == ours.render(messages)
    parsed = ours.encode_chat(messages, parse_special=True)
    assert parsed == theirs.apply_chat_template(messages, return_dict=False)
    assert parsed.count(end) == 2


@pytest.mark.parametrize("content", ["a EOT b", ["E", "OT"], ["EO", "T x"], ["x", "E", "O", "T"]])
@pytest.mark.parametrize("own", ["EOT", "<|end|>", "E"])
def test_special_tokens_of_letters_alone(own: str, content: Any, tmp_path: Path) -> None:
    """A word may be put together of letters of several texts; roles that have such letters stay what they are."""
    looks = "{% if message.role == 'TEST' %}{{ message.content | join }}{% else %}{{ raise_exception('x') }}{% endif %}"
    theirs = save(tmp_path, f"{{% for message in messages %}}{looks} {own}{{% endfor %}}")
    ours = ChatTokenizer.from_folder(tmp_path)
    ours.tokenizer.add_special_tokens(["EOT"])
    end = ours.tokenizer.token_to_id("EOT")
    messages = [{"role": "TEST", "content": content}]
    ids = ours.encode_chat(messages)
    assert ids.count(end) == (own == "EOT")
    assert theirs.decode([one for one in ids if one != end]) == ours.render(messages).removesuffix(
        "EOT" * (own == "EOT")
    )
    assert ours.encode_chat(messages, parse_special=True).count(end) == 1 + (own == "EOT")


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


def test_malformed_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        ChatTokenizer.from_folder(tmp_path)
    ours = chat_tokenizer(tmp_path, "{% for %}")
    ours.encode("a")
    with pytest.raises(CheckpointError, match="chat template 'default', line 1: "):
        ours.render([USER])
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in (3, [{"name": "default"}]):
        edit(tmp_path / "tokenizer_config.json", chat_template=wrong)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: (chat_template = 3|template is missing)"):
            ChatTokenizer.from_folder(tmp_path)
    edit(tmp_path / "tokenizer_config.json", chat_template=None)
    ChatTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer fails \("):
        ChatTokenizer.from_folder(tmp_path)


def test_end_tokens(tmp_path: Path) -> None:
    assert chat_tokenizer(tmp_path, None).eos_token_ids == ()
    for name, values, expected in (
        ("config.json", {"text_config": {"eos_token_id": [1, 2]}}, (1, 2)),
        ("config.json", {"eos_token_id": 0}, (0,)),
        ("generation_config.json", {"temperature": 1}, (0,)),
        ("generation_config.json", {"eos_token_id": [257, 259]}, (257, 259)),
    ):
        edit(tmp_path / name, **values)
        assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == expected
    for wrong in ("<eos>", [257, -1], True):
        edit(tmp_path / "generation_config.json", eos_token_id=wrong)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id = "):
            ChatTokenizer.from_folder(tmp_path)
