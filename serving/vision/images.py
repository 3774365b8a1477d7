"""Images of requests: data: URLs, files of one folder and, if allowed, the network; bounded in bytes and pixels."""

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

_BYTES_PER_PIXEL = 4  # as Pillow keeps RGB
# Most pixels along a side, as in JPEG. Pillow keeps 8 bytes for each row: images of one column would take six times
# what their pixels take.
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
    """Bytes that threads hold together; who needs more than are left waits until others release theirs.

    decoding: held while an image is decoded. Decoders take up to 16 bytes a pixel, see `ImageRules`, for one image at a
        time.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_left = num_bytes
        self.decoding = Lock()
        self._changed = Condition()

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Hold bytes, at most as many as there are in all, until the block ends."""
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
    """Where the images of a request may come from, and how large they may be.

    An image takes 4 bytes a pixel. While it is decoded it takes more: 8 as PNG, GIF or BMP, 12 as progressive JPEG, 16
    as WebP.

    Attributes:
        max_images: of a request.
        max_bytes: of an image as it is stored.
        max_pixels: width times height of an image, of which each is at most 65,535.
        max_decoded_bytes: of all images of a request, 4 a pixel.
        allow_http: whether http: and https: URLs are fetched. Clients can then make the server call any address.
        folder: folder with the files that file: URLs may name; None for no files.
        timeout_s: seconds to fetch an image.
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
        """Hold the images of a request. No pixel is decoded before the budget has room for all of them.

        Args:
            budget: of `max_decoded_bytes` or more. The images count until the block ends.

        Raises:
            InvalidInputError: there are too many images, or too large ones; or as `load`.
            UnsupportedError: as `load`.
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
                images.clear()  # an error keeps the list

    def load(self, url: str) -> Image:
        """Return the image of a URL.

        Raises:
            InvalidInputError: the URL is malformed or not allowed, or the image cannot be read or is too large.
            UnsupportedError: pillow is not installed.
        """
        return self.read(self._data(url))

    def _data(self, url: str) -> bytes:
        """Return the bytes of a URL. Errors are those of `load`."""
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
        """Return the image in a file. Errors are those of `load`."""
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
        """Return the RGB image of a file's bytes, turned as its EXIF orientation says. Errors are those of `load`."""
        return self._decoded(self._opened(data))

    def _opened(self, data: bytes) -> Image:
        """Return an image whose header alone is read, if that has no more than the allowed pixels."""
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
        """Return an opened image as RGB, without what its file and its decoder hold."""
        from PIL import ImageOps

        with _readable():
            ImageOps.exif_transpose(image, in_place=True)
            # A copy even of RGB: the image of a WebP file keeps 12 bytes a pixel beside its own.
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
        for handler in _HTTP_HANDLERS:  # a redirection leads to no other scheme
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
        except (OSError, ValueError, RuntimeError):  # no path, or a loop of links
            pass
        raise InvalidInputError(f"image_url: {one_line(path, 100)!r} is no file of the images' folder")


@contextmanager
def _readable() -> Iterator[None]:
    """Raise what decoders raise, which is of many kinds, as InvalidInputError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error, 100)}"
        raise InvalidInputError(f"image: cannot be read ({reason}), expected one of {', '.join(FORMATS)}") from error
