"""Conversations give the text and the token ids that transformers makes of them, for templates in several styles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paged import ChatTokenizer, CheckpointError, UnsupportedError
from paged.executors.command_line.cli import RECALL
from paged.executors.text.detokenizer import Detokenizer
from tests.executors.text.checkpoints import ANSWER, CALL, CHATML, GEMMA, LLAMA, SYSTEM, TOOL, USER, edit, save


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (LLAMA, [SYSTEM, USER, ANSWER, USER], {}),
        (LLAMA, [USER], {"date": "2 May", "bos_token": "<|turn|>"}),
        (CHATML, [SYSTEM, USER, ANSWER, {"role": "comment", "content": "none"}, USER], {"enable_thinking": False}),
        (CHATML, [USER, CALL], {"enable_thinking": True}),
        (GEMMA, [SYSTEM, USER, ANSWER, USER], {}),
    ],
)
def test_same_text_and_ids_as_transformers(
    template: str, messages: list[Any], options: dict[str, Any], prompted: bool, tools: Any, tmp_path: Path
) -> None:
    theirs = save(tmp_path, template)
    ours = ChatTokenizer.from_folder(tmp_path)
    assert ours.has_chat_template
    options = options | {"add_generation_prompt": prompted, "tools": tools}
    text = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.render(messages, **options) == text
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.encode_chat(messages, **options) == ids
    assert ours.encode(text, parse_special=True) == theirs.encode(text) == [theirs.bos_token_id, *ids]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_malformed_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        ChatTokenizer.from_folder(tmp_path)
    save(tmp_path, "{% for %}")
    ours = ChatTokenizer.from_folder(tmp_path)
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
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no tokenizer \("):
        ChatTokenizer.from_folder(tmp_path)


def test_end_tokens(tmp_path: Path) -> None:
    save(tmp_path, None)
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == ()
    edit(tmp_path / "config.json", text_config={"eos_token_id": [1, 2]})
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == (1, 2)
    edit(tmp_path / "config.json", eos_token_id=0)
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == (0,)
    edit(tmp_path / "generation_config.json", temperature=1)
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == (0,)
    edit(tmp_path / "generation_config.json", eos_token_id=[257, 259])
    assert ChatTokenizer.from_folder(tmp_path).eos_token_ids == (257, 259)
    for wrong in ("<eos>", [257, -1], True):
        edit(tmp_path / "generation_config.json", eos_token_id=wrong)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id = "):
            ChatTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_missing_packages_are_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, GEMMA)
    assert ChatTokenizer.from_folder(tmp_path).render([USER])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=f"the {package} package: pip install"):
        ChatTokenizer.from_folder(tmp_path).render([USER])


def test_bundled_checkpoint_and_streaming() -> None:
    """As an Engine's tokenizer: a decoder of growing lists gets the text of the whole."""
    ours = ChatTokenizer.from_folder(RECALL)
    assert not ours.has_chat_template
    assert len(ours.eos_token_ids) == 1
    ids = ours.encode("a=1 b=2 ?a")
    reader = Detokenizer(ours)
    pieces = [reader.read(ids, end, is_last=end == len(ids)) for end in range(1, len(ids) + 1)]
    assert "".join(pieces) == ours.decode(ids)
