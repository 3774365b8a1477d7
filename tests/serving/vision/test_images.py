"""Images by URL: what is read, and what is refused by name."""

import base64
import contextlib
import http.server
import io
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageFile

from paged import InvalidInputError
from paged.serving.vision.images import FORMATS, ByteBudget, ImageRules
from tests.deadline import HANG_S

RULES = ImageRules(max_bytes=1 << 14, max_pixels=400, timeout_s=HANG_S)


def encoded(size: tuple[int, int] = (20, 10), kind: str = "PNG", mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, 3).save(stream, kind)
    return stream.getvalue()


def as_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", FORMATS)
def test_formats(kind: str) -> None:
    image = RULES.load(as_url(encoded(kind=kind)))
    assert (image.mode, image.size) == ("RGB", (20, 10))


def test_orientation_and_other_modes() -> None:
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (20, 10)).save(stream, "JPEG", exif=exif)
    assert RULES.read(stream.getvalue()).size == (10, 20)
    assert RULES.read(encoded(mode="L")).mode == "RGB"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (as_url(encoded((21, 20))), "21 x 20 pixels, expected at most 400"),
        (as_url(encoded(kind="GIF").replace(b"\x14\0\n\0", b"\xff" * 4)), "65535 x 65535 pixels|DecompressionBomb"),
        (as_url(bytes(1 << 15)), "more than 16384 bytes"),
        (as_url(encoded(kind="TIFF")), "expected one of PNG"),
        (as_url(encoded()[:40]), "cannot be read"),
        (as_url(b""), "cannot be read"),
        ("data:image/png;base64,?", "not base64"),
        ("data:text/plain,hello", "expected data:image"),
        ("http://localhost/a.png", "expected data:image"),
        ("file:///etc/passwd", "expected data:image"),
        ("/etc/passwd", "expected data:image"),
        ("http://[", "no URL"),
    ],
)
def test_refused(url: str, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        RULES.load(url)


def test_files_of_a_folder_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    inside.mkdir()
    (inside / "a b.png").write_bytes(encoded())
    (inside / "link.png").symlink_to(outside)
    outside.write_bytes(encoded())
    rules = replace(RULES, folder=inside)
    assert rules.load(f"file://{inside}/a%20b.png").size == (20, 10)
    for path in (outside, inside / ".." / "out.png", inside / "link.png", inside, inside / "none.png", "/dev/zero"):
        with pytest.raises(InvalidInputError, match="no file of the images' folder"):
            rules.load(f"file://{path}")
    (inside / "large.png").write_bytes(bytes(1 << 15))
    with pytest.raises(InvalidInputError, match="expected at most 16384"):
        rules.load(f"file://{inside}/large.png")


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/slow":  # byte by byte, until its reader has gone
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
        self.wfile.write(encoded() if self.path == "/image" else bytes(1 << 15))

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_network_only_if_allowed(address: str) -> None:
    rules = replace(RULES, allow_http=True)
    assert rules.load(f"{address}/image").size == (20, 10)
    with pytest.raises(InvalidInputError, match="expected data"):
        RULES.load(f"{address}/image")
    for page, text in [("large", "at most 16384"), ("away", "cannot be fetched")]:
        with pytest.raises(InvalidInputError, match=text):
            rules.load(f"{address}/{page}")
    with pytest.raises(InvalidInputError, match=r"not done after 0\.5 s|timed out"):
        replace(rules, timeout_s=0.5).load(f"{address}/slow")


def test_decoded_bytes_are_bounded() -> None:
    """Random requests in threads, some of whose images or users fail: never more is decoded than the budget allows."""
    rules = replace(RULES, max_pixels=1000, max_decoded_bytes=3000)
    budget, lock = ByteBudget(5000), threading.Lock()
    held: dict[int, int] = {}  # decoded bytes of each thread
    totals = [0]

    def note(number: int, num_bytes: int) -> None:
        with lock:
            held[number] = num_bytes
            totals.append(sum(held.values()))

    def outcome_of(urls: list[str], sizes: list[tuple[int, int]], number: int, is_failing: bool) -> str:
        try:
            with rules.loaded(urls, budget) as images:
                assert [image.size for image in images] == sizes
                note(number, sum(4 * image.width * image.height for image in images))
                time.sleep(0.001)
                note(number, 0)
                if is_failing:
                    raise RuntimeError("the model")
                return "used"
        except RuntimeError:
            return "failed"
        except InvalidInputError as error:
            return "large" if "images are too large" in str(error) else "unreadable"

    def use(number: int) -> Counter[str]:
        choices, outcomes = random.Random(number), Counter[str]()
        for _ in range(12):
            sizes = [(choices.randrange(1, 26), choices.randrange(1, 26)) for _ in range(choices.randrange(1, 4))]
            data = [encoded(size, choices.choice(["PNG", "BMP"]), choices.choice(["RGB", "L"])) for size in sizes]
            is_cut, is_failing = choices.random() < 0.2, choices.random() < 0.2
            if is_cut:
                data[-1] = data[-1][:60]
            outcome = outcome_of(list(map(as_url, data)), sizes, number, is_failing)
            outcomes[outcome] += 1
            if not is_cut:
                is_large = sum(4 * width * height for width, height in sizes) > rules.max_decoded_bytes
                assert outcome == ("large" if is_large else "failed" if is_failing else "used")
        return outcomes

    with ThreadPoolExecutor(8) as threads:
        outcomes = sum(threads.map(use, range(8)), Counter[str]())
    assert budget.num_left == 5000
    assert 3000 < max(totals) <= 5000
    assert set(outcomes) == {"used", "failed", "large", "unreadable"}


def test_nothing_is_decoded_of_too_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are read from headers, of every format."""
    rules = ImageRules(max_pixels=1 << 20, max_decoded_bytes=3 << 20)
    urls = [as_url(encoded((512, 512), kind)) for kind in FORMATS]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    for kind in FORMATS:
        context = rules.loaded([as_url(encoded((512, 512), kind))] * 4, ByteBudget(1 << 30))
        with pytest.raises(InvalidInputError, match="expected at most 3145728 bytes of pixels"), context:
            pass
    context = replace(rules, max_images=4).loaded(urls, ByteBudget(1 << 30))
    with pytest.raises(InvalidInputError, match="5 images, expected at most 4"), context:
        pass
