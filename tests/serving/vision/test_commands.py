"""Images for `paged generate` and in chats of `paged serve`: answers are those of transformers, errors have names."""

import argparse
import base64
import io
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from paged import ChatTokenizer
from paged.serving.command_line import cli
from paged.serving.command_line.serve import vision_of
from paged.serving.vision.vision_model import VisionModel
from tests.serving.http.test_connections import request_bytes
from tests.serving.http.test_limits import ask
from tests.serving.http.test_openai import check_idle
from tests.serving.served import serving
from tests.serving.vision.test_vision_model import IMAGES
from tests.serving.vision.towers import IMAGE, Tower

MakeTower = Callable[[str], Tower]


def answer_of_transformers(tower: Tower, text: str) -> str:
    """Greedy text for the images, then a text, as one message."""
    processor, tokenizer = tower.save_processor(), ChatTokenizer.from_folder(tower.folder)
    inputs = dict(processor(images=IMAGES, return_tensors="pt"))
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": text}]
    rendered = tokenizer.render([{"role": "user", "content": parts}]).split("<|image_pad|>")
    counts = [*(inputs["image_grid_thw"].prod(-1) // 4).tolist(), 0]
    ids = [
        token
        for piece, count in zip(rendered, counts, strict=True)
        for token in [*tokenizer.encode(piece, parse_special=True), *[IMAGE] * count]
    ]
    prompt = torch.tensor([ids])
    inputs |= {"input_ids": prompt, "mm_token_type_ids": (prompt == IMAGE).long()}
    with torch.no_grad():
        found = tower.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokenizer.decode(found[0, len(ids) :].tolist())


def test_generate(tower: MakeTower, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tower("qwen2_5_vl")
    expected = answer_of_transformers(made, "differ?")
    files = [tmp_path / f"{number}.png" for number in range(2)]
    for file, image in zip(files, IMAGES, strict=True):
        image.save(file)
    given = ["--prompt", "differ?", "--max-new-tokens", "8", "--temperature", "0", "--ignore-eos", "--json"]
    given += ["--num-blocks", "64", "--block-size", "8", "--device", "cpu"]

    def run(*images: object, folder: Path = made.folder) -> int:
        return cli.main(["generate", str(folder), *given, *(f"--image={image}" for image in images)])

    assert run(*files) == 0
    assert expected
    assert json.loads(capsys.readouterr().out)["answers"][0]["text"] == expected
    assert run(*reversed(files)) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["text"] != expected
    for images, folder, text in [
        ([tmp_path / "none.png"], made.folder, "none.png' is no file"),
        ([Path(__file__)], made.folder, "expected one of PNG"),
        (files, cli.RECALL, "images for"),
    ]:
        assert run(*images, folder=folder) == 1
        assert text in capsys.readouterr().err


def test_texts_need_no_packages_of_images(
    tower: MakeTower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tower("qwen2_5_vl")
    made.save_processor()
    folder = made.folder
    tokenizer, args = ChatTokenizer.from_folder(folder), argparse.Namespace(max_images=8, dtype=None, device="cpu")
    assert vision_of(folder, tokenizer, args) is not None
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert vision_of(folder, tokenizer, args) is None
    assert "serves text alone: images need PIL: pip install" in capsys.readouterr().err


def as_part(image: Image.Image | str) -> dict[str, Any]:
    if isinstance(image, str):
        return {"type": "image_url", "image_url": {"url": image}}
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return as_part("data:image/png;base64," + base64.b64encode(stream.getvalue()).decode())


def test_chats(tower: MakeTower, tmp_path: Path) -> None:
    made = tower("qwen3_vl")
    expected = answer_of_transformers(made, "differ?")
    IMAGES[1].save(tmp_path / "a.png")
    text = {"type": "text", "text": "differ?"}
    with serving(made.folder, max_images=2, max_image_pixels=1000, image_folder=tmp_path) as served:

        def answer(*parts: dict[str, Any], **more: Any) -> tuple[int, Any]:
            given = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **more}
            body = given | {"messages": [{"role": "user", "content": list(parts)}]}
            status, _, found = ask(served, "/v1/chat/completions", body)
            return status, found["error" if status >= 400 else "choices"]

        first, second = map(as_part, IMAGES)
        for other in (second, as_part(f"file://{tmp_path}/a.png")):
            status, choices = answer(first, other, text)
            assert status == 200, choices
            assert choices[0]["message"]["content"] == expected
        assert answer(second, first, text)[1][0]["message"]["content"] != expected
        assert [one["message"]["content"] for one in answer(first, second, text, n=2)[1]] == [expected] * 2
        data = first["image_url"]["url"].partition(",")[2]
        sources = [{"type": "base64", "media_type": "image/png", "data": data}]
        sources.append({"type": "url", "url": f"file://{tmp_path}/a.png"})
        blocks = [*({"type": "image", "source": source} for source in sources), text]
        results = [{"type": "tool_result", "tool_use_id": "a", "content": blocks}]
        asked: Any = {"temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": blocks}]}
        shown = ask(served, "/v1/messages", asked)[2]["content"][0]["text"]
        assert shown
        assert expected.startswith(shown)
        asked["messages"][0]["content"] = results
        assert ask(served, "/v1/messages", asked)[0] == 200
        messages = {"messages": [{"role": "user", "content": [first, text]}]}
        assert ask(served, "/tokenize", messages)[2]["tokens"].count(IMAGE) > 1
        for parts, message in [
            ((first, first, first), "3 images, expected at most 2"),
            ((as_part("http://localhost/a.png"),), "expected data:image"),
            ((as_part("file:///etc/passwd"),), "no file of the images' folder"),
            ((as_part("data:image/png;base64,AAAA"),), "expected one of PNG"),
            ((as_part(Image.new("RGB", (40, 40))),), "40 x 40 pixels, expected at most 1000"),
            (({"type": "image_url"},), "image_url: Field required"),
            (({"type": "input_audio"},), "does not match any of the expected tags"),
        ]:
            status, error = answer(*parts, text)
            assert (status, message in error["message"]) == (400, True), error
            assert error["param"]
        status, error = answer(text, chat_template_kwargs={"longest": 1})
        assert (status, error["param"]) == (400, "chat_template_kwargs")
        assert answer(text)[0] == 200


def test_pixels_in_all_are_bounded(tower: MakeTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request beyond its budget is refused; the server's is whole again after answers, errors and lost clients."""
    made = tower("qwen3_vl")
    made.save_processor()
    parts = list(map(as_part, IMAGES))
    num_bytes = sum(4 * image.width * image.height for image in IMAGES)
    with serving(made.folder, max_image_bytes=num_bytes, max_server_image_bytes=2 * num_bytes) as served:
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        assert ask(served, "/v1/chat/completions", body)[0] == 200
        more = {**body, "messages": [{"role": "user", "content": [*parts, parts[0]]}]}
        status, _, answer = ask(served, "/v1/chat/completions", more)
        assert (status, answer["error"]["param"]) == (400, "image_url")
        budget, encode = served.service.image_bytes, VisionModel.encode_chat
        assert budget.num_left == 2 * num_bytes
        begun, ending = threading.Semaphore(0), threading.Event()

        def slow(*args: Any, **options: Any) -> Any:
            begun.release()
            assert ending.wait(60)
            return encode(*args, **options)

        monkeypatch.setattr(VisionModel, "encode_chat", slow)
        clients = [served.connect() for _ in range(6)]
        for client in clients:
            client.sendall(request_bytes("/v1/chat/completions", body))
        for _ in range(2):
            assert begun.acquire(timeout=60)
        assert budget.num_left == 0
        for client in clients:
            client.close()
        check_idle(served)
        ending.set()
        assert ask(served, "/v1/chat/completions", body)[0] == 200
        deadline = time.monotonic() + 60
        while budget.num_left != 2 * num_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
