"""Allowed values of Host and Origin, so that web pages of other sites cannot use the server."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import Scope

from paged.errors import InvalidInputError
from paged.serving.http.config import ServeConfig
from paged.serving.http.errors import ApiError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]]+)(:\d{0,5})?", re.IGNORECASE)


class HostRules:
    """Refuses requests of web pages of other sites.

    A page can make its own name resolve to this machine (DNS rebinding). Its requests then have that name as Host;
    requests of all other pages have their site as Origin. Both headers are checked if the server listens on the
    loopback, where no public name leads, or if `allowed_hosts` is given.

    Raises:
        InvalidInputError: `allowed_hosts` is malformed.
    """

    def __init__(self, config: ServeConfig) -> None:
        entries = [entry.strip() for entry in config.allowed_hosts.split(",") if entry.strip()]
        self.is_checked = "*" not in entries and (bool(entries) or _is_loopback(config.host))
        self._allowed = {_plain(config.host)}
        for entry in entries:
            match = _HOST.fullmatch(entry)
            if match is None and ("[" in entry or _address(entry) is None):
                raise InvalidInputError(f"--allowed-hosts: {entry!r}, expected NAME, NAME:PORT or *")
            if match is None:
                self._allowed.add(_plain(entry))
            else:
                self._allowed.add(_plain(match[1]) + (match[2] or ""))

    def check(self, scope: Scope) -> None:
        """Raise ApiError with 421 for a foreign Host, 403 for a foreign Origin. Missing headers are allowed."""
        if not self.is_checked:
            return
        address = scope["server"][0] if scope.get("server") else ""
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            if name == b"host" and not self._is_allowed(text, address):
                raise ApiError(421, f"Host: {text!r} is not allowed, see --allowed-hosts", code="host_not_allowed")
            if name == b"origin" and not self._is_allowed(text.partition("://")[2], address):
                raise ApiError(403, f"Origin: {text!r} is not allowed, see --allowed-hosts", code="origin_not_allowed")

    def _is_allowed(self, host: str, address: str) -> bool:
        """Return whether a host, with or without port, is allowed. address: local address of the connection."""
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = _plain(match[1])
        names = {name, name + (match[2] or "")}
        return _is_loopback(name) or name == _plain(address) or not names.isdisjoint(self._allowed)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Parse an IP address; return None for a name."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _plain(host: str) -> str:
    """Normalise a name or address: lower case, without brackets and final dot."""
    address = _address(host)
    return host.lower().removesuffix(".") if address is None else str(address)


def _is_loopback(host: str) -> bool:
    address = _address(host)
    if address is not None:
        return address.is_loopback
    return _plain(host) == "localhost" or _plain(host).endswith(".localhost")
