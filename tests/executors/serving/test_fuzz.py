"""Schemathesis against the server's own OpenAPI document: whatever it sends is the client's fault, or answered.

SOAK=1 makes 2,000 calls in place of 150, which send every route right and wrong bodies as well."""

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.deadline import HANG_S
from tests.executors.serving.conftest import Served
from tests.executors.serving.test_openai import check_idle

CALLS = 2000 if "SOAK" in os.environ else 150


@pytest.mark.thorough  # 15 s
def test_no_call_is_the_servers_fault(served: Served) -> None:
    schema = schemathesis.openapi.from_dict(served.app.openapi())
    operations: list[Any] = [one.ok() for one in schema.get_all_operations()]
    statuses: list[int] = []

    def call(case: Any) -> None:
        answer = case.call(base_url=served.url, timeout=HANG_S)
        statuses.append(answer.status_code)
        assert answer.status_code < 500 or answer.json()["error"]["code"] == "timeout", answer.text

    bodies = [one for one in operations if one.method == "post"]
    for operation in operations:
        count = CALLS // len(bodies) if operation in bodies else 5
        limits = settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        for mode in schemathesis.GenerationMode if operation in bodies else [schemathesis.GenerationMode.POSITIVE]:
            limits(given(case=operation.as_strategy(generation_mode=mode))(call))()
    assert len(statuses) >= CALLS
    assert len([status for status in statuses if status == 200]) > CALLS / 40
    check_idle(served)
