"""Images of requests: data: URLs, files of one folder and, if allowed, the network; bounded in bytes and pixels."""

from __future__ import annotations

import base64
import binascii
import io
import re
import urllib.request
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from paged.errors import InvalidInputError, UnsupportedError
from paged.printable import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.IGNORECASE)
_HTTP_HANDLERS = (
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
)


@dataclass(frozen=True)
class ImageRules:
    """Where the images of a request may come from, and how large they may be.

    Attributes:
        max_images: of a request.
        max_bytes: of an image as it is stored.
        max_pixels: width times height of an image.
        allow_http: whether http: and https: URLs are fetched. Clients can then make the server call any address.
        folder: folder with the files that file: URLs may name; None for no files.
        timeout_s: seconds to fetch an image.
    """

    max_images: int = 8
    max_bytes: int = 32 << 20
    max_pixels: int = 32 << 20
    allow_http: bool = False
    folder: Path | None = None
    timeout_s: float = 10.0

    def load_all(self, urls: Sequence[str]) -> list[Image]:
        """Return the images of a request. Errors are those of `load`; and InvalidInputError for too many."""
        if len(urls) > self.max_images:
            raise InvalidInputError(f"image_url: {len(urls)} images, expected at most {self.max_images}")
        return [self.load(url) for url in urls]

    def load(self, url: str) -> Image:
        """Return the image of a URL.

        Raises:
            InvalidInputError: the URL is malformed or not allowed, or the image cannot be read or is too large.
            UnsupportedError: pillow is not installed.
        """
        if _DATA.match(url):
            return self.read(self._decoded(url))
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidInputError(f"image_url: {one_line(url, 100)!r} is no URL ({error})") from error
        if parts.scheme in ("http", "https") and self.allow_http:
            return self.read(self._fetched(url))
        if parts.scheme == "file" and self.folder is not None:
            return self.read_file(self._allowed(unquote(parts.path)))
        allowed = ["data:image/...;base64,...", *["http(s)"] * self.allow_http, *["file:"] * (self.folder is not None)]
        raise InvalidInputError(f"image_url: {one_line(url, 100)!r}, expected {' or '.join(allowed)}")

    def read_file(self, path: Path) -> Image:
        """Return the image in a file. Errors are those of `load`."""
        try:
            if not path.is_file():
                raise InvalidInputError(f"image: {one_line(path, 100)!r} is no file")
            with path.open("rb") as opened:
                data = opened.read(self.max_bytes + 1)
        except (OSError, ValueError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"image: {one_line(path, 100)!r} cannot be read") from error
        return self.read(data)

    def read(self, data: bytes) -> Image:
        """Return the RGB image of a file's bytes, turned as its EXIF orientation says. Errors are those of `load`."""
        try:
            from PIL import Image, ImageOps
        except ImportError as error:
            raise UnsupportedError("images need the pillow package: pip install 'paged[vision]'") from error
        if len(data) > self.max_bytes:
            raise InvalidInputError(f"image: {len(data)} bytes, expected at most {self.max_bytes}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(io.BytesIO(data), formats=FORMATS)
            pixels = image.width * image.height
            if pixels > self.max_pixels:
                size = f"{image.width} x {image.height}"
                raise InvalidInputError(f"image: {size} pixels, expected at most {self.max_pixels} in all")
            return ImageOps.exif_transpose(image).convert("RGB")
        except (InvalidInputError, MemoryError):
            raise
        except Exception as error:  # decoders raise many kinds
            reason = f"{type(error).__name__}: {one_line(error, 100)}"
            raise InvalidInputError(
                f"image: cannot be read ({reason}), expected one of {', '.join(FORMATS)}"
            ) from error

    def _decoded(self, url: str) -> bytes:
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
