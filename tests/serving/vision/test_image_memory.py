"""Memory of images while they are decoded and afterwards, measured over formats, modes and extreme shapes."""

import io
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator

import pytest
from PIL import Image

from paged import InvalidInputError
from paged.serving.vision.images import LONGEST_SIDE, ByteBudget, ImageRules
from tests.serving.vision.test_images import as_url, encoded

RULES = ImageRules()
# Pillow's JPEG encoder takes sides of at most 65,500.
SHAPES = [(1024, 2048), (65_500, 32), (32, 65_500), (16_383, 128), (1, 65_500)]
TURNED = Image.Exif()
TURNED[0x0112] = 6
# Bytes a pixel, as `ImageRules` tells users.
PEAKS = {"PNG": 8, "GIF": 8, "BMP": 8, "JPEG": 8, "progressive JPEG": 12, "WEBP": 16}
KEPT = 4
# Files, tables of rows and what the allocator rounds up.
SLACK = 8 << 20


def header(width: int, height: int) -> bytes:
    """The begin of a PNG file of a size that is not written out."""
    data = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data))


@pytest.mark.parametrize("size", [(1, 33_000_000), (33_000_000, 1), (LONGEST_SIDE + 1, 1), (1, 1 << 31)])
def test_long_sides_are_refused(size: tuple[int, int]) -> None:
    """By the header, however few the pixels are."""
    with pytest.raises(InvalidInputError, match="image"), RULES.loaded([as_url(header(*size))] * 2, ByteBudget(1)):
        pass


def test_a_frame_that_is_larger_than_its_file_says() -> None:
    """A GIF's frames may lie outside of it; their pixels count."""
    data = encoded((60, 60), "GIF")
    smaller = data[:6] + struct.pack("<HH", 1, 1) + data[10:]
    with pytest.raises(InvalidInputError, match="60 x 60 pixels, expected at most 100"):
        ImageRules(max_pixels=100).load(as_url(smaller))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_keep_nothing_of_their_files(kind: str) -> None:
    image = RULES.load(as_url(encoded(kind=kind)))
    assert type(image) is Image.Image
    assert image.info == {}


def files(size: tuple[int, int]) -> Iterator[tuple[str, bytes]]:
    """Files of a size in every format, with the peak that each may reach."""
    shade = Image.linear_gradient("L").resize(size)
    color = Image.merge("RGB", (shade, shade.point(lambda value: value * 3 % 256), shade))

    def saved(image: Image.Image, kind: str, **options: object) -> bytes:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        return stream.getvalue()

    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = color.convert(mode)
        yield "PNG", saved(image, "PNG", compress_level=1)
        yield "PNG", saved(image, "PNG", compress_level=1, exif=TURNED)
    yield "PNG", saved(shade.convert("I;16"), "PNG", compress_level=1)
    yield "PNG", saved(color.convert("P"), "PNG", compress_level=1, transparency=3)
    for mode in ("L", "RGB", "CMYK"):
        yield "JPEG", saved(color.convert(mode), "JPEG", exif=TURNED)
        yield "progressive JPEG", saved(color.convert(mode), "JPEG", progressive=True, subsampling=0)
    yield "GIF", saved(color.convert("P"), "GIF", transparency=3)
    yield "GIF", saved(color.convert("P"), "GIF", save_all=True, append_images=[shade.convert("P")])
    for mode in ("1", "L", "P", "RGB", "RGBA"):
        yield "BMP", saved(color.convert(mode), "BMP")
    if max(size) < 16_384:
        yield "WEBP", saved(color, "WEBP", method=0, exif=TURNED)
        yield "WEBP", saved(color.convert("RGBA"), "WEBP", lossless=True, method=0, quality=0)
        yield "WEBP", saved(color, "WEBP", method=0, save_all=True, append_images=[shade.convert("RGB")])


def peak_of(call: Callable[[], object]) -> int:
    """Bytes of memory that a call takes at most, in a process of its own."""

    def most(work: Callable[[], object]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        _, status, usage = os.wait4(pid, 0)
        assert status == 0
        return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    return most(call) - most(lambda: None)


@pytest.mark.thorough
@pytest.mark.parametrize("size", SHAPES)
def test_memory_while_images_are_decoded(size: tuple[int, int]) -> None:
    for kind, data in files(size):
        RULES.read(encoded(kind=kind.split()[-1]))  # modules are loaded once
        num_pixels = size[0] * size[1]
        assert peak_of(lambda data=data: RULES.read(data)) < PEAKS[kind] * num_pixels + SLACK, (kind, size)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["PNG", "progressive JPEG", "WEBP"])
def test_memory_of_several_images(kind: str) -> None:
    """One after the other is decoded, and each keeps its pixels alone."""
    size = (1024, 2048)
    data = next(data for other, data in files(size) if other == kind)
    RULES.read(encoded(kind=kind.split()[-1]))
    urls = [as_url(data)] * 8

    def load() -> None:
        with RULES.loaded(urls, ByteBudget(1 << 30)):
            pass

    num_pixels = size[0] * size[1]
    # Twice one image's peak: the allocator keeps some of what was freed.
    assert peak_of(load) < (8 * KEPT + 2 * PEAKS[kind]) * num_pixels + SLACK
