"""Process that renders chat templates under limits enforced by the system.

Jinja's sandbox protects other objects but does not bound work; it limits only `range`. An expression such as
`'a' * 10**9`, `x.center(10**9)` or a comparison of lists that contain each other runs in C to its end, past any counter
or deadline. Therefore a process has the limits. It is reused, because starting one takes 150 times as long as
rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from paged.tools.bounded_process import limit_memory, may_have_memory

if TYPE_CHECKING:
    from jinja2 import Template

CPU_S = 2.0
"""Limit of CPU time for one rendering in seconds."""
MEGABYTES = 192
"""Memory limit in MB, in addition to the process's own and the conversation's memory."""


def handler() -> Callable[[bytes], bytes]:
    """Return the function that renders templates from JSON to JSON, see `bounded_process.Root`."""
    return _rendered


def _rendered(message: bytes) -> bytes:
    num_bytes = (MEGABYTES << 20) + 8 * len(message)
    limit_memory(num_bytes)
    try:
        request = json.loads(message)
        reply = _answer(request["template"], request["values"], request["limit"])
    except MemoryError:
        if not may_have_memory(num_bytes):
            raise
        # The state of the heap is unknown now, so a new process must render the next template.
        reply = {"error": f"it takes more than {MEGABYTES} MB of memory", "is_last": True}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
    return json.dumps(reply).encode()


def _answer(source: str, values: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return {text} or {error}. is_syntax: the template fails for all messages."""
    import jinja2

    try:
        template = compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "is_syntax": True}
    except MemoryError:
        raise
    except Exception as error:  # Python's compiler raises for deeply nested templates
        return {"error": f"{type(error).__name__}: {str(error)[:2000]}", "is_syntax": True}
    messages = []
    for message in values["messages"]:
        messages.append({name: value for name, value in message.items() if value is not None})
    values["messages"] = messages
    parts, length = [], 0
    try:
        for part in template.generate(values):
            parts.append(part)
            length += len(part)
            if length > limit:
                return {"error": f"it writes more than {limit} characters"}
    except MemoryError:
        raise
    except Exception as error:  # expressions in a template may raise anything
        return {"error": str(error)[:2000] or type(error).__name__}
    return {"text": "".join(parts)}


@lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """Compile a template in transformers' sandbox, with the functions that templates expect."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Tag {% generation %}, which marks text to train on and has no effect here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Dump JSON without the HTML escapes of Jinja's own filter."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(source)
