"""Checkpoints with packed weights run as the same weights unpacked do."""

from __future__ import annotations

import pytest

from tests.models.quantization.checkpoints import Folders, assert_as_unpacked
from tests.models.quantization.packers import FORMATS

pytestmark = pytest.mark.usefixtures("_fast")


@pytest.mark.parametrize("folders", FORMATS, indirect=True)
def test_logits_of_the_unpacked_weights(folders: Folders) -> None:
    assert_as_unpacked(folders)
