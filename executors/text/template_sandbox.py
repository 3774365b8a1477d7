"""The process in which chat templates run: renders what comes on stdin, under limits that the system enforces.

Jinja's sandbox keeps a template from other objects, not from work without end: of its loops it limits `range` alone,
and one expression, `'a' * 10**9`, `x.center(10**9)`, a comparison of lists that hold each other twice, forty deep, runs
in C to its end, where neither a count of iterations nor a deadline between parts is looked at. So the limits
are those of a process, and the process lasts, since starting one takes 150 ms and a rendering 1.
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
"""Seconds of processor time for one rendering, rounded down to a whole second of the process: at least 1."""
MEGABYTES = 192
"""Memory of the process, the 20 that it takes by itself included; what a conversation takes comes on top."""


def serve() -> None:
    """Answer requests until stdin ends; each is a line of JSON in ASCII, and so is its answer."""
    for data in sys.stdin.buffer:
        _limit(len(data))
        try:
            request = json.loads(data)
            reply = _answer(request["template"], request["values"], request["limit"])
        except MemoryError:
            # What is left of the heap is unknown: the next one is rendered by a new process.
            reply = {"error": f"it takes more than {MEGABYTES} MB of memory", "is_last": True}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        print(json.dumps(reply), flush=True)


def _limit(request_bytes: int) -> None:
    """Limit processor time from now on, and memory. Where a system lacks such limits, the caller's deadline remains."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(usage.ru_utime + usage.ru_stime)
        # The signal that ends the process would leave a core.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        memory = (MEGABYTES << 20) + 8 * request_bytes
        for kind, soft in ((resource.RLIMIT_CPU, spent + CPU_S), (resource.RLIMIT_DATA, memory)):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _answer(source: str, values: dict[str, Any], limit: int) -> dict[str, Any]:
    """text: what the template writes; or error: why not. is_syntax: no messages would do."""
    import jinja2

    try:
        template = compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "is_syntax": True}
    except MemoryError:
        raise
    except Exception as error:  # of Python's compiler, for a template that nests too deeply
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
    except Exception as error:  # a template may raise whatever an expression can
        return {"error": str(error)[:2000] or type(error).__name__}
    return {"text": "".join(parts)}


@lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """Compile with what templates count on, in the sandbox that transformers takes too."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what is trained on: here nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Jinja's own escapes what HTML would take for markup."""
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
