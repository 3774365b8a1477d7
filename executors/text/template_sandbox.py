"""The process that renders chat templates from stdin, under limits that the system enforces.

Jinja's sandbox protects other objects, but does not bound work. It limits only `range`. One expression, such as
`'a' * 10**9`, `x.center(10**9)` or a comparison of lists that contain each other, runs in C to its end, past any
counter or deadline. So a process carries the limits. It is kept: starting one takes 150 ms, and rendering takes 1 ms.
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

CPU_S = 2
"""Seconds of CPU time for one rendering. The process rounds its time down to a whole second, so at least 1."""
MEGABYTES = 192
"""Memory of the process in MB, including about 20 for itself; the conversation's own memory is added."""


def serve() -> None:
    """Answer requests until stdin ends; each request and each answer is one line of ASCII JSON."""
    for data in sys.stdin.buffer:
        _limit(len(data))
        try:
            request = json.loads(data)
            reply = _answer(request["template"], request["values"], request["limit"])
        except MemoryError:
            # The heap's state is unknown now: a new process renders the next template.
            reply = {"error": f"it takes more than {MEGABYTES} MB of memory", "is_last": True}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        print(json.dumps(reply), flush=True)


def _limit(request_bytes: int) -> None:
    """Limit CPU time from now on, and memory. On a system without such limits, the caller's deadline remains."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(usage.ru_utime + usage.ru_stime)
        # Without this, the signal that ends the process would write a core dump.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        memory = (MEGABYTES << 20) + 8 * request_bytes
        for kind, soft in ((resource.RLIMIT_CPU, spent + CPU_S), (resource.RLIMIT_DATA, memory)):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _answer(source: str, values: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return {text} or {error}; is_syntax: the template fails for all messages."""
    import jinja2

    try:
        template = compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "is_syntax": True}
    except MemoryError:
        raise
    except Exception as error:  # Python's compiler raises for templates nested too deeply
        return {"error": f"{type(error).__name__}: {str(error)[:2000]}", "is_syntax": True}
    values["messages"] = [{k: v for k, v in message.items() if v is not None} for message in values["messages"]]
    parts, length = [], 0
    try:
        for part in template.generate(values):
            parts.append(part)
            length += len(part)
            if length > limit:
                return {"error": f"it writes more than {limit} characters"}
    except MemoryError:
        raise
    except Exception as error:  # an expression in a template may raise anything
        return {"error": str(error)[:2000] or type(error).__name__}
    return {"text": "".join(parts)}


@lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """Compile a template with the functions that templates expect, in the same sandbox as transformers."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks text to train on; it changes nothing here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Dump JSON without HTML escapes, which Jinja's own filter adds."""
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
