"""Files of recorded calls that say anything: each is replayed, or refused with exit code 1. None runs code."""

import io
import json
import os
import random
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

import paged
from paged import CheckpointError
from paged.tools.recorded_calls.decoder import PARTS
from paged.tools.recorder import read_call
from tests.fuzz.children import MOST_LOOPS, call_in_child
from tests.fuzz.kernels.kernel_calls import CALLS
from tests.fuzz.values import changed

# Operations with caches, classes, lists and flags among their arguments.
NAMES = ("copy_blocks", "gated_delta_rule", "moe_align_block_size", "paged_attention", "route_and_align")
# What a place of the JSON is replaced with.
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**40, 2**63, 2**64, 10**400, 1.5, -0.0, float("nan"), float("inf")),
    *(
        "",
        "x",
        "\x1b[2J",
        "../../etc/passwd",
        "/proc/self/mem",
        "serve",
        "paged.tools.bounded_process:serve",
        "a" * 10_000,
    ),
    *([], {}, [[]], [0], [-1], [1] * 5000, {"list": [None] * 5000}, {"tuple": []}, {"dict": {}}, {"unknown": "x"}),
    *(
        {"tensor": "0"},
        {"tensor": "9999"},
        {"object": "paged.tools.bounded_process:serve", "fields": {}},
        "float64",
        "str",
    ),
    {"object": "paged.kernels.moe.routing:Routing", "fields": {"top_k": 1}},
]
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect", "os.remove")


def _recorded(name: str, folder: Path) -> bytes:
    torch.manual_seed(0)
    with paged.record(folder, [name]):
        getattr(paged, name)(**CALLS[name].pack(CALLS[name].arguments()))
    (path,) = folder.iterdir()
    return path.read_bytes()


def _parts(content: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        with safe_open(file.name, framework="pt") as opened:
            about = json.loads(opened.metadata()["paged_call"])
            return about, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping


def _mutated(content: bytes, draw: random.Random) -> bytes:
    """The file with one or two changes: of bits of its header, its length, its JSON, or its tensors."""
    kind = draw.choice(["flip", "cut", "json", "json", "json", "json", "nested", "tensors"])
    header_size = 8 + int.from_bytes(content[:8], "little")
    if kind == "flip":
        flipped = bytearray(content)
        for _ in range(draw.randint(1, 3)):
            flipped[draw.randrange(header_size)] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == "cut":
        return content[: draw.randrange(len(content))] + bytes(draw.choice([0, 9]))
    about, tensors = _parts(content)
    if kind == "nested":
        text = json.dumps(about).replace('"git": ', f'"git": {"[" * 100_000}', 1)
        return save(tensors, {"paged_call": text})
    if kind == "tensors":
        key = draw.choice(sorted(tensors))
        changes = [tensors[key].flatten(), tensors[key][:1], tensors[key].double(), torch.zeros(0), torch.ones(())]
        tensors[key] = draw.choice(changes).contiguous()
        return save(tensors, {"paged_call": json.dumps(about)})
    for _ in range(draw.randint(1, 2)):
        about = changed(about, [draw.randrange(100) for _ in range(draw.randint(1, 9))], draw.choice(HOSTILE))
    return save(tensors, {"paged_call": json.dumps(about)})


def _replay_all(contents: list[bytes]) -> list[int]:
    """Exit codes. The first file is sound; with it, everything is imported that a replay needs."""
    from paged.serving.command_line.cli import main

    os.environ["TRITON_INTERPRET"] = "0"
    events: list[str] = []
    codes: list[int] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not codes:
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            events.append(f"{event} {arguments[0]}")
        if event == "import" and not arguments[0].startswith(("paged.kernels.", "torch.")):
            events.append(f"{event} {arguments[0]}")
        if event in _PROCESSES:
            events.append(event)

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for index, content in enumerate(contents):
            paths.append(Path(folder) / f"{index}.safetensors")
            paths[-1].write_bytes(content)
        sys.addaudithook(audit)
        for path in paths:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                codes.append(main(["verify", "--replay", str(path), "--device", "cpu", "--backend", "torch"]))
        assert events == []
        codes_before = list(codes)
        codes.clear()  # what the folder's removal does is none of the files'
    return codes_before


def _check(name: str, count: int, folder: Path) -> None:
    content = _recorded(name, folder)
    draw = random.Random(name)
    contents = [content, *(_mutated(content, draw) for _ in range(count))]
    codes = call_in_child(_replay_all, contents, loops=20 * MOST_LOOPS, megabytes=1000).result
    assert codes[0] == 0
    assert set(codes) <= {0, 1}
    assert codes.count(1) > count // 2


@pytest.mark.parametrize("name", ["paged_attention"])
def test_changed_files(name: str, tmp_path: Path) -> None:
    _check(name, 40, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_many_changed_files(name: str, tmp_path: Path) -> None:
    _check(name, 150, tmp_path)


def test_no_name_of_a_file_becomes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither functions that modules of ours have, nor modules beside the file, nor classes in another's place."""
    content = _recorded("rms_norm", tmp_path / "calls")
    (tmp_path / "canary.py").write_text(f"open({str(tmp_path / 'written')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "calls" / "changed.safetensors"
    about, tensors = _parts(content)
    objects = {
        "paged.tools.bounded_process:import_module": {"name": "canary"},
        "paged.tools.bounded_process:serve": {"module": "canary", "niceness": 0},
        "paged.models.registry:load_model": {"folder": str(tmp_path), "trust_remote_code": True},
        "paged.tools.recorder:os.system": {"command": f"touch {tmp_path / 'written'}"},
        "canary:anything": {},
        "paged.kernels.moe.routing:Routing": {"top_k": 1},
    }
    hostile: list[dict[str, Any]] = [{"operation": name} for name in ("serve", "load_model", "Routing", "check_ids")]
    for name, fields in objects.items():
        arguments = {"dict": {"x": {"object": name, "fields": fields}}}
        hostile.append({"arguments": {"value": arguments, "storages": []}})
        hostile.append({"returned": {"value": {"object": name, "fields": fields}, "storages": []}})
    for change in hostile:
        path.write_bytes(save(tensors, {"paged_call": json.dumps({**about, **change})}))
        with pytest.raises(CheckpointError, match="holds no recorded call: "):
            read_call(path, torch.device("cpu"))
    assert "canary" not in sys.modules
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = {"folder": tmp_path, "pipe": tmp_path / "pipe", "device": Path("/dev/zero")}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match="no regular file"):
        read_call(path, torch.device("cpu"))


def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    """Storages and shapes that a small file claims, and a header that is longer than any that is written."""
    about, tensors = _parts(_recorded("rms_norm", tmp_path / "calls"))
    x = about["arguments"]["value"]["dict"]["x"]
    path = tmp_path / "changed"
    changes: list[tuple[dict[str, Any], list[list[int]], str]] = [
        ({}, [[0, 2**50], [0, 96]], "more than a quarter of the memory of cpu"),
        ({"shape": [2**40, 24], "stride": [0, 1]}, [[0, 480], [0, 96]], "in a storage of 480 bytes"),
        ({"shape": [2**40, 0], "stride": [1, 1]}, [[0, 480], [0, 96]], "in a storage of 480 bytes"),
        ({"stride": [-24, 1]}, [[0, 480], [0, 96]], "stride: expected whole numbers"),
        ({"stride": [2**61, 1]}, [[0, 480], [0, 96]], "outside of its storage"),
        ({"offset": 2}, [[0, 480], [0, 96]], "outside of its storage"),
        ({"storage": 2}, [[0, 480], [0, 96]], "in storage 2"),
        ({"blocks": [0, 0, 1, 2, 3]}, [[0, 480], [0, 96]], "in order, each once"),
        ({"blocks": [0, 1, 2, 3, 5]}, [[0, 480], [0, 96]], "in order, each once"),
    ]
    for change, storages, error in changes:
        about["arguments"]["value"]["dict"]["x"] = {**x, **change}
        about["arguments"]["storages"] = storages
        path.write_bytes(save(tensors, {"paged_call": json.dumps(about)}))
        with pytest.raises(CheckpointError, match=error):
            read_call(path, torch.device("cpu"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for part in PARTS:  # each one alone would fit
        about[part]["storages"] = [[0, memory // 10]]
    path.write_bytes(save(tensors, {"paged_call": json.dumps(about)}))
    with pytest.raises(CheckpointError, match="more than a quarter of the memory of cpu"):
        read_call(path, torch.device("cpu"))
    with path.open("wb") as file:
        file.truncate(memory)
    with pytest.raises(CheckpointError, match="more than a quarter of this machine's memory"):
        read_call(path, torch.device("cpu"))
    path.write_bytes((9 << 20).to_bytes(8, "little") + bytes(10 << 20))
    with pytest.raises(CheckpointError, match="a header of 9437184 bytes"):
        read_call(path, torch.device("cpu"))


def _read(content: bytes) -> int:
    """Bytes of the storage of x."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        x: torch.Tensor = read_call(file.name, torch.device("cpu")).arguments["x"]
        return x.untyped_storage().nbytes()


def test_pages_that_no_value_fills_take_no_memory(tmp_path: Path) -> None:
    """Of a pool of which few blocks are reached, or of a file that claims one."""
    about, tensors = _parts(_recorded("rms_norm", tmp_path))
    about["arguments"]["storages"][0] = [0, 1 << 30]
    outcome = call_in_child(_read, save(tensors, {"paged_call": json.dumps(about)}), megabytes=100)
    assert (outcome.error, outcome.result) == ("", 1 << 30)
