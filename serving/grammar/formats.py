"""Formats of JSON schemas as ECMAScript patterns.

The patterns exclude rare texts that parsers disagree about, such as leap seconds.
"""

from __future__ import annotations


def _uuid(version: str) -> str:
    return rf"^[0-9A-Fa-f]{{8}}-[0-9A-Fa-f]{{4}}-{version}[0-9A-Fa-f]{{3}}-[89ABab][0-9A-Fa-f]{{3}}-[0-9A-Fa-f]{{12}}$"


def _ipv6() -> str:
    """Return the pattern of an IPv6 address: eight groups, or fewer around two colons."""
    group = "[0-9A-Fa-f]{1,4}"
    forms = [f"(?:{group}:){{7}}{group}"]
    for num_left in range(7):
        before, after = "", ""
        if num_left:
            before = f"{group}(?::{group}){{{num_left - 1}}}"
        if num_left < 6:
            after = f"(?:{group}(?::{group}){{0,{5 - num_left}}})?"
        forms.append(f"{before}::{after}")
    return f"^(?:{'|'.join(forms)})$"


_DAYS = r"(?:0[1-9]|1\d|2[0-8])"
_YEAR = r"[1-9]\d{3}"
_LEAP_YEAR = r"(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAYS}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_DAY_SPAN = r"(?:\d{1,4}Y(?:\d{1,4}M(?:\d{1,4}D)?)?|\d{1,4}M(?:\d{1,4}D)?|\d{1,4}D)"
_TIME_SPAN = r"T(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S)"
_LABEL = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,29}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_PATH_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_BASE64 = r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"

TEXT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": rf"^P(?:{_DAY_SPAN}(?:{_TIME_SPAN})?|{_TIME_SPAN}|\d{{1,4}}W)$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+[A-Za-z]{{2,12}}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^{_OCTET}(?:\.{_OCTET}){{3}}$",
    "ipv6": _ipv6(),
    "uri": (
        rf"^[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::\d{{1,5}})?(?:/{_PATH_CHARACTER}*)*"
        rf"|{_PATH_CHARACTER}+(?:/{_PATH_CHARACTER}*)*)(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?$"
    ),
    "uuid": r"^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    **{f"uuid{version}": _uuid(version) for version in "1345678"},
    "byte": f"^{_BASE64}$",
    "base64": f"^{_BASE64}$",
    "base64url": r"^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?$",
}
"""ECMAScript pattern by format."""

STANDARD_FORMATS = frozenset(
    "date time date-time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex".split()
)
"""Formats defined by JSON Schema."""

NUMBER_RANGES = {
    "int8": (-(1 << 7), (1 << 7) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
    "uint8": (0, (1 << 8) - 1),
    "uint16": (0, (1 << 16) - 1),
    "uint32": (0, (1 << 32) - 1),
    "uint64": (0, (1 << 64) - 1),
}
"""Integer ranges of OpenAPI."""

WITHOUT_MEANING = frozenset("binary password path file-path directory-path float double decimal".split())
"""Formats that only describe the purpose of a value and do not restrict it."""
