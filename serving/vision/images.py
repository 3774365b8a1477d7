"""Images of requests from data: URLs, a folder or, if allowed, the network, with limits of bytes and pixels."""

from __future__ import annotations

import base64
import binascii
import io
import re
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from paged.errors import InvalidInputError, UnsupportedError
from paged.tools.printable import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

_BYTES_PER_PIXEL = 4  # Pillow's storage of RGB
# Limit of width and height, as in JPEG. Pillow also stores 8 bytes for each row, so very narrow images would take more
# memory than their pixels.
LONGEST_SIDE = 65_535
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.IGNORECASE)
_HTTP_HANDLERS = (
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
)


class ByteBudget:
    """Memory budget of several threads. A thread that needs more than is left waits until others release bytes.

    decoding: lock held while an image is decoded, so that only one decoder at a time takes its additional memory, see
    `ImageRules`.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_left = num_bytes
        self.decoding = Lock()
        self._changed = Condition()

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes, at most the whole budget, within the context."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_left >= num_bytes)
            self.num_left -= num_bytes
        try:
            yield
        finally:
            with self._changed:
                self.num_left += num_bytes
                self._changed.notify_all()


@dataclass(frozen=True)
class ImageRules:
    """Allowed sources and sizes of a request's images.

    An image takes 4 bytes per pixel, and more while it is decoded (up to 16 for WebP, see limits.md).

    Attributes:
        max_images: maximum number of images of a request.
        max_bytes: maximum size of an encoded image.
        max_pixels: maximum of width times height of an image. Each side is limited to 65,535.
        max_decoded_bytes: maximum size of all decoded images of a request, 4 bytes per pixel.
        allow_http: whether to fetch http: and https: URLs. Clients can then make the server call any address.
        folder: folder for file: URLs; None for no files.
        timeout_s: time limit to fetch an image, in seconds.
    """

    max_images: int = 8
    max_bytes: int = 32 << 20
    max_pixels: int = 32 << 20
    max_decoded_bytes: int = 256 << 20
    allow_http: bool = False
    folder: Path | None = None
    timeout_s: float = 10.0

    @contextmanager
    def loaded(self, urls: Sequence[str], budget: ByteBudget) -> Iterator[list[Image]]:
        """Load the images of a request for the context. No image is decoded before the budget has bytes for all.

        Args:
            budget: budget of at least `max_decoded_bytes`. It counts the images until the context ends.

        Raises:
            InvalidInputError: there are too many or too large images; or see `load`.
            UnsupportedError: see `load`.
        """
        if len(urls) > self.max_images:
            raise InvalidInputError(f"image_url: {len(urls)} images, expected at most {self.max_images}")
        images, num_bytes = [], 0
        for url in urls:
            images.append(self._opened(self._data(url)))
            num_bytes += _BYTES_PER_PIXEL * images[-1].width * images[-1].height
            if num_bytes > self.max_decoded_bytes:
                limit = f"{self.max_decoded_bytes} bytes of pixels in all, {_BYTES_PER_PIXEL} a pixel"
                raise InvalidInputError(f"image_url: the images are too large, expected at most {limit}")
        with budget.held(num_bytes):
            try:
                for index in range(len(images)):
                    with budget.decoding:
                        images[index] = self._decoded(images[index])
                yield images
            finally:
                images.clear()  # free the images even if an error's traceback keeps the list

    def load(self, url: str) -> Image:
        """Return the image of a URL.

        Raises:
            InvalidInputError: the URL is malformed or not allowed, or the image is unreadable or too large.
            UnsupportedError: pillow is not installed.
        """
        return self.read(self._data(url))

    def _data(self, url: str) -> bytes:
        """Return the bytes of a URL; raises the errors of `load`."""
        if _DATA.match(url):
            return self._from_base64(url)
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidInputError(f"image_url: {one_line(url, 100)!r} is no URL ({error})") from error
        if parts.scheme in ("http", "https") and self.allow_http:
            return self._fetched(url)
        if parts.scheme == "file" and self.folder is not None:
            return self._file_data(self._allowed(unquote(parts.path)))
        allowed = ["data:image/...;base64,...", *["http(s)"] * self.allow_http, *["file:"] * (self.folder is not None)]
        raise InvalidInputError(f"image_url: {one_line(url, 100)!r}, expected {' or '.join(allowed)}")

    def read_file(self, path: Path) -> Image:
        """Return the image in a file; raises the errors of `load`."""
        return self.read(self._file_data(path))

    def _file_data(self, path: Path) -> bytes:
        try:
            if not path.is_file():
                raise InvalidInputError(f"image: {one_line(path, 100)!r} is no file")
            with path.open("rb") as opened:
                return opened.read(self.max_bytes + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"image: {one_line(path, 100)!r} cannot be read") from error

    def read(self, data: bytes) -> Image:
        """Return the RGB image of a file's bytes, rotated by its EXIF orientation; raises the errors of `load`."""
        return self._decoded(self._opened(data))

    def _opened(self, data: bytes) -> Image:
        """Read only the header of an image; return the image if its number of pixels is allowed."""
        try:
            from PIL import Image
        except ImportError as error:
            raise UnsupportedError("images need the pillow package: pip install 'paged[vision]'") from error
        if len(data) > self.max_bytes:
            raise InvalidInputError(f"image: {len(data)} bytes, expected at most {self.max_bytes}")
        with _readable(), warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > self.max_pixels or max(image.size) > LONGEST_SIDE:
            size = f"{image.width} x {image.height}"
            limits = f"{self.max_pixels} in all and {LONGEST_SIDE} along a side"
            raise InvalidInputError(f"image: {size} pixels, expected at most {limits}")
        return image

    def _decoded(self, image: Image) -> Image:
        """Return an opened image as RGB, without the memory of its file and decoder."""
        from PIL import ImageOps

        with _readable():
            ImageOps.exif_transpose(image, in_place=True)
            # Copy even RGB, because the image of a WebP file keeps its decoder's memory.
            decoded = image.copy() if image.mode == "RGB" else image.convert("RGB")
        decoded.info.clear()
        return decoded

    def _from_base64(self, url: str) -> bytes:
        if len(url) > 4 * self.max_bytes // 3 + 100:
            raise InvalidInputError(f"image_url: more than {self.max_bytes} bytes")
        try:
            return base64.b64decode(url.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidInputError(f"image_url: data that is not base64 ({error})") from error

    def _fetched(self, url: str) -> bytes:
        opener = urllib.request.OpenerDirector()
        for handler in _HTTP_HANDLERS:  # only these handlers, so that a redirection cannot use another scheme
            opener.add_handler(handler())
        end, data = monotonic() + self.timeout_s, b""
        try:
            with opener.open(url, timeout=self.timeout_s) as answer:
                while len(data) <= self.max_bytes and (part := answer.read1(1 << 16)):
                    data += part
                    if monotonic() > end:
                        raise TimeoutError(f"not done after {self.timeout_s:g} s")
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"image_url: {one_line(url, 100)!r} cannot be fetched ({error})") from error
        return data

    def _allowed(self, path: str) -> Path:
        assert self.folder is not None
        try:
            file = Path(path).resolve()
            if file.is_relative_to(self.folder.resolve()) and file.is_file():
                return file
        except (OSError, ValueError, RuntimeError):  # an invalid path or a loop of links
            pass
        raise InvalidInputError(f"image_url: {one_line(path, 100)!r} is no file of the images' folder")


@contextmanager
def _readable() -> Iterator[None]:
    """Convert the various errors of decoders to InvalidInputError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error, 100)}"
        raise InvalidInputError(f"image: cannot be read ({reason}), expected one of {', '.join(FORMATS)}") from error
