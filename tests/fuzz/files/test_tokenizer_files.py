"""A tokenizer's files may hold anything: a tokenizer that works, or a named error, in bounded time and memory."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from paged import ChatTokenizer, CheckpointError, InvalidInputError, PagedError
from tests.fuzz.children import call_in_child
from tests.fuzz.files.checkpoint_folders import put
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.values import JSON, Hostile, changed

TEXTS = ("a b ab <s> <eos> </think>", "", "é" * 50, "a" * 2000, "x [SEP]\n" * 20)
MESSAGES = [{"role": "user", "content": "a <eos> </think>"}]


def _bases() -> dict[str, dict[str, Any]]:
    """One tokenizer.json of each family, small."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_bytes = Tokenizer(BPE({char: index for index, char in enumerate(alphabet)} | {"ab": 256}, [("a", "b")]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    by_bytes.add_special_tokens(["<bos>", "<eos>"])
    by_bytes.add_tokens(["</think>"])
    by_bytes.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("b", -2.0), ("▁ab", -1.5), ("<s>", 0.0)]
    by_pieces = Tokenizer(Unigram(pieces, 0, False))
    by_pieces.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    by_pieces.pre_tokenizer, by_pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    by_pieces.add_special_tokens(["<s>", "<unk>"])
    by_pieces.enable_padding(length=5)
    by_pieces.enable_truncation(8)
    words = {"[UNK]": 0, "a": 1, "##b": 2, "[CLS]": 3, "[SEP]": 4}
    by_words = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    by_words.normalizer, by_words.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    by_words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.BertPreTokenizer()])
    by_words.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    by_words.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    found = {"bytes": by_bytes, "pieces": by_pieces, "words": by_words}
    return {name: json.loads(tokenizer.to_str()) for name, tokenizer in found.items()}


BASES = _bases()
FILES: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {
        "bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": "{{ messages }}<eos>",
    },
    "generation_config.json": {"eos_token_id": [1, 2], "temperature": 0.5},
}  # fmt: skip


def _replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _many(kind: str, step: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: [step] * 40}


def _template(pieces: list[Any], special_tokens: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special_tokens}


_TEXT, _X = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}
_LONG_TOKEN = {"x": {"id": "x", "ids": [1] * 3000, "tokens": ["a"] * 3000}}
_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
# What of a tokenizer.json explodes: a section and what it holds.
BOMBS = {
    "doubled": ("normalizer", _many("normalizers", _replace("aa", String="a"))),
    "doubled by nothing": ("normalizer", _many("normalizers", _replace("a", Regex="x*"))),
    "doubled between": ("normalizer", _many("normalizers", _replace("a", Regex="(?=a)"))),
    "bytes of bytes": ("normalizer", _many("normalizers", {"type": "ByteLevel"})),
    "bytes before": ("pre_tokenizer", _many("pretokenizers", _BYTES)),
    "doubled back": ("decoder", _many("decoders", _replace("aa", String="a"))),
    "put before": ("normalizer", {"type": "Prepend", "prepend": "a" * 10**6}),
    "without a type": ("normalizer", {"prepend": "a" * 10**6}),
    "repeated": ("post_processor", _template([_TEXT] * 1000, {})),
    "surrounded": ("post_processor", _template([_X] * 3000 + [_TEXT], _LONG_TOKEN)),
}
_PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
# What is absurd and does no harm: no prompt is padded or cut.
HARMLESS = {
    "padded": ("padding", {"strategy": {"Fixed": 10**12}, **_PADDING}),
    "cut": ("truncation", {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}),
    "replaced": ("normalizer", _replace("bb", String="a")),
}
ODD = JSON | st.sampled_from([
    2**31, 2**32, 2**63, 10**30, 1e308, "a" * 1000, "(a+)+$", "(", "�", "", ["a", "b"], [["a", "b"]],
    {"Fixed": 10**12}, {"String": ""}, {"Regex": "(a|a)*b"}, {"type": "Sequence"}, {"type": "ByteLevel"},
    {"type": "Prepend", "prepend": ""}, {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40},
    {"type": "FixedLength", "length": 0}, {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    _replace("a" * 1000, String="a"), BOMBS["doubled"][1],
])  # fmt: skip


# A tokenizer, and one change of one of its files: where, and to what.
CASES = st.fixed_dictionaries({
    "base": st.sampled_from(sorted(BASES)), "file": st.sampled_from(["tokenizer.json"] * 4 + sorted(FILES)),
    "steps": st.lists(st.integers(0, 300), min_size=1, max_size=6), "value": ODD,
})  # fmt: skip


@contextlib.contextmanager
def folder_of(files: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for name, values in files.items():
            (Path(folder) / name).write_text(json.dumps(values))
        yield Path(folder)


def use(files: dict[str, Any]) -> int:
    """Read a folder of these, encode and decode; how many token ids there were. Errors of a call must have a name."""
    with folder_of(files) as folder:
        tokenizer = ChatTokenizer.from_folder(folder)
    count = 0
    for text in TEXTS:
        with contextlib.suppress(PagedError):
            ids = tokenizer.encode(text)
            count += len(ids)
            assert isinstance(tokenizer.decode(ids), str)
    with contextlib.suppress(PagedError):
        tokenizer.decode([0, 1, 10**6])
    with contextlib.suppress(PagedError):
        tokenizer.encode_chat(MESSAGES)
    for odd in ([-1], [2**32], [1.5], ["a"], None, [None]):
        with pytest.raises(PagedError):
            tokenizer.decode(odd)  # type: ignore[arg-type]
    assert all(type(token) is int for token in tokenizer.eos_token_ids)
    return count


@fuzz(CASES, examples=10, thorough=30)
def test_tokenizer_files(case: Any) -> None:
    files = {"tokenizer.json": BASES[case["base"]]} | FILES
    files[case["file"]] = changed(files[case["file"]], case["steps"], case["value"])
    call_in_child(use, files)


@pytest.mark.parametrize("base", BASES)
def test_unchanged_files_work(base: str) -> None:
    assert call_in_child(use, {"tokenizer.json": BASES[base]} | FILES).result > (1000 if base == "bytes" else 50)


@pytest.mark.parametrize("name", [*BOMBS, *HARMLESS])
def test_tokenizers_that_explode(name: str) -> None:
    section, content = (BOMBS | HARMLESS)[name]
    outcome = call_in_child(use, {"tokenizer.json": BASES["bytes"] | {section: content}})
    if name in BOMBS:
        assert outcome.error.startswith("CheckpointError: ")
        assert section in outcome.error
    else:
        assert outcome.result > 2000


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
    "additional_chat_templates/x.jinja",
)
LINKS = ("/dev/zero", "/dev/full", "/proc/self/mem", "/proc/kmsg", "nowhere", "x" * 3000, "itself")


def read_odd_files(name: str, kinds: list[str]) -> list[str | None]:
    """What reading a folder comes to, file by file of these kinds: None, or the named error."""
    found: list[str | None] = []
    for kind in kinds:
        with folder_of({"tokenizer.json": BASES["bytes"]} | FILES) as folder:
            (folder / name).parent.mkdir(exist_ok=True)
            if kind != "as it is":
                put(folder / name, kind)
            try:
                ChatTokenizer.from_folder(folder)
                found.append(None)
            except CheckpointError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_files_that_are_none(name: str) -> None:
    """Neither waited for nor taken for absent; what /proc says to be empty is read as that."""
    kinds = ["pipe", "folder", "sparse", "utf-16", *LINKS]
    unchanged, *errors = call_in_child(read_odd_files, name, ["as it is", *kinds]).result
    assert unchanged is None
    for kind, error in zip(kinds, errors, strict=True):
        if not (kind.startswith("/proc") and name.endswith(".jinja")):
            assert error is not None, kind
            assert Path(name).name in error


def test_many_templates(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(BASES["bytes"]))
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    for count, is_refused in ((32, False), (33, True)):
        for number in range(count):
            (more / f"{number}.jinja").write_text("a")
        with pytest.raises(CheckpointError, match="33 chat templates") if is_refused else contextlib.nullcontext():
            assert len(ChatTokenizer.from_folder(tmp_path).template.templates) == 32


@pytest.mark.parametrize("path", [None, b"x", 5, 1.5, [], "a\0b", Hostile()])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^path: "):
        ChatTokenizer.from_folder(path)
