"""ChatTemplate: where templates are found, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest

from paged import ChatTokenizer, InvalidInputError
from tests.serving.text.checkpoints import CHATML, GEMMA, TOOL, USER, chat_tokenizer, edit, save


@pytest.mark.parametrize("form", ["jinja files", "one text", "named texts"])
def test_where_templates_are_found(form: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    named = {"default": "plain {{ messages[0].content }}{{ eos_token }}", "tool_use": "tools {{ tools | length }}"}
    save(tmp_path, named)
    assert (tmp_path / "chat_template.jinja").is_file()
    config = tmp_path / "tokenizer_config.json"
    if form != "jinja files":
        (tmp_path / "chat_template.jinja").unlink()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
        assert not ChatTokenizer.from_folder(tmp_path).has_chat_template
        listed = [{"name": name, "template": text} for name, text in named.items()]
        edit(config, chat_template=named["default"] if form == "one text" else listed)
    # As written before transformers 5.
    edit(config, eos_token={"__type": "AddedToken", "content": "<eos>"}, pad_token=None)
    ours, theirs = ChatTokenizer.from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools in (None, [TOOL]):
        assert ours.render([USER], tools=tools) == theirs.apply_chat_template([USER], tokenize=False, tools=tools)
    assert ours.render([USER]) == f"plain {USER['content']}<eos>"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [USER], "no chat template"),
        (GEMMA, ["hello"], r"messages: \['hello'\], expected at least one, each a mapping"),
        (GEMMA, [{"role": "user", "content": Path()}], "not JSON serializable, expected JSON values"),
        (GEMMA, [USER, USER], "refuses them: roles must alternate user/assistant"),
        ("{{ messages[0].name + 1 }}", [USER], "refuses them: .*has no attribute 'name'"),
        # What the sandbox is for.
        ("{{ ''.__class__.__mro__ }}", [USER], "refuses them: .*unsafe"),
        ("{{ messages.append(1) }}", [USER], "refuses them: .*unsafe"),
        ("{% for i in range(999999) %}{% endfor %}", [USER], "refuses them: .*too big"),
    ],
)
def test_refusals(template: str | None, messages: list[Any], message: str, tmp_path: Path) -> None:
    ours = chat_tokenizer(tmp_path, template)
    for run in (ours.render, ours.encode_chat):
        with pytest.raises(InvalidInputError, match=message):
            run(messages)
    assert ours.has_chat_template == (template is not None)


@pytest.mark.parametrize("content", [["a"], [], [{"type": "image"}], [{"text": 1}], 1, {"text": "a"}])
def test_a_last_message_without_text_does_not_go_on(content: Any, tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    with pytest.raises(InvalidInputError, match="ends with something other than text"):
        chat_tokenizer(tmp_path, CHATML).render(messages, continue_final_message=True)


@pytest.mark.parametrize("content", ["Yes, ", "a<b", "two\n\nlines", "é"])
@pytest.mark.parametrize("template", [CHATML, GEMMA], ids=["chatml", "gemma"])
def test_the_last_message_goes_on_as_in_transformers(template: str, content: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    save(tmp_path, template)
    ours, theirs = ChatTokenizer.from_folder(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = ours.render([USER, {"role": "assistant", "content": content}], continue_final_message=True)
    messages = [USER, {"role": "assistant", "content": content}]
    assert text == theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text.rstrip().endswith(content.rstrip())
