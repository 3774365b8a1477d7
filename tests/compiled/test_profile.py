"""Sectors and bank conflicts of kernels whose accesses once took more than the least."""

import json
import os
import subprocess
import sys

import pytest

_PROFILES = """
import json
import sys
from dataclasses import asdict

from paged.bench.compiled import profile
from paged.bench.kernels.run import CASES

names = sys.argv[1:]
profiles = profile.run([(case.card, case.row) for case in CASES if case.name in names], "sm_90", lambda _: None)
print(json.dumps([asdict(each) for each in profiles]))
"""
# Row and kernel -> columns that reach the least.
LEAST = {
    ("paged_attention.decode int8", "attention"): ("loads", "fetched", "stores"),
    ("paged_attention.decode int8", "merge_splits"): ("loads", "fetched", "stores", "banks"),
    ("mla_norm_rope_and_cache", "concat_and_cache_mla"): ("loads", "fetched", "stores", "banks"),
    ("quantized_linear.e4m3 decode", "quantize_rows"): ("loads", "fetched", "banks"),
    ("add_lora.prefill", "lora_shrink"): ("loads", "stores", "banks"),
}


@pytest.mark.thorough
def test_accesses_fill_their_sectors() -> None:
    command = [sys.executable, "-c", _PROFILES, *{row for row, _ in LEAST}]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    profiles = {(each["case"], each["kernel"]): each for each in json.loads(result.stdout)}
    ratios = {(*key, column): profiles[key][column] for key, columns in LEAST.items() for column in columns}
    assert {key: ratio for key, ratio in ratios.items() if ratio > 1.05} == {}
