"""Faults in the PTX of kernels: where they are planted, and that they are seen."""

import os
import re
import subprocess
import sys

import pytest

from paged.bench.compiled.faults import RULES
from paged.bench.compiled.ptx import read
from tests.compiled.ptx_program import module

_STORE = "st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };"
_COPY = "@%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;"
_WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, %p1, 1, 1, 0, 0;"
_SCOPE = "{ .reg .b64 %planted; add.s64 %planted, %rd2, "
PLACES = {
    "wait_group dropped": [("cp.async.wait_group 1;", ""), ("wgmma.wait_group.sync.aligned 0;", "")],
    "wait_group weaker by one": [("cp.async.wait_group 1;", "cp.async.wait_group 2;")],
    "bar.sync dropped": [("bar.sync 0;", "")],
    "proxy fence dropped": [("fence.proxy.async.shared::cta;", "")],
    "mbarrier wait dropped": [("@!complete bra.uni waitLoop;", "")],
    "mbarrier phase inverted": [
        (
            "mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;",
            "mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], 1;",
        )
    ],
    "mbarrier expects fewer bytes": [
        (
            "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 8192;",
            "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 4096;",
        )
    ],
    "descriptor: address": [(_WGMMA, f"{_SCOPE}1; {_WGMMA.replace('%rd2', '%planted')} }}")],
    "descriptor: leading offset": [(_WGMMA, f"{_SCOPE}65536; {_WGMMA.replace('%rd2', '%planted')} }}")],
    "descriptor: stride": [(_WGMMA, f"{_SCOPE}4294967296; {_WGMMA.replace('%rd2', '%planted')} }}")],
    "descriptor: swizzle": [(_WGMMA, f"{_SCOPE}{1 << 62}; {_WGMMA.replace('%rd2', '%planted')} }}")],
    "store narrower": [(_STORE, "st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };")],
    "copy narrower": [(_COPY, "@%p1 cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 8, %r2;")],
    "predicate dropped": [(_COPY, _COPY.removeprefix("@%p1 "))],
    "predicate inverted": [(_COPY, f"@!{_COPY[1:]}"), ("@%p3 bra $L_1;", "@!%p3 bra $L_1;")],
    "load or store moved": [(_STORE, _STORE.replace("+ 0 ]", "+16]").replace(" +16", "+16"))],
    "ldmatrix moved": [
        (
            "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r3];",
            "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r3+16];",
        )
    ],
    "ticket relaxed": [
        (
            "@%p1 atom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 + 0 ], %r2;",
            "@%p1 atom.global.gpu.relaxed.add.u32 %r1, [ %rd1 + 0 ], %r2;",
        )
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_places_of_faults(rule: object) -> None:
    for line, changed in PLACES[rule.kind]:  # type: ignore[attr-defined]
        assert rule.planted(line) == changed  # type: ignore[attr-defined]
        if "complete" not in line and "$L" not in line:
            read(module(changed, 1, 32))
        for other in ("add.s32 %r1, %r2, 3;", "ret;", "ld.param.b64 %rd1, [program_param_0];"):
            assert rule.planted(other) is None  # type: ignore[attr-defined]


@pytest.mark.thorough
@pytest.mark.parametrize("problem", ["rms_norm", "route_and_align"])
def test_faults_are_seen(problem: str) -> None:
    command = [sys.executable, "-m", "paged.bench.compiled.faults", "--only", problem, "--each", "2"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    seen, changing = (int(number) for number in re.findall(r"^(\d+) of (\d+) that change", output, re.MULTILINE)[0])
    assert seen == changing >= 7, output
    assert re.search(r"^bar.sync dropped, all at once +1 +1 ", output, re.MULTILINE), output
