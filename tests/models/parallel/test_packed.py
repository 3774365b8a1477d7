"""Packed weights in parts: every projection of a rank gives what those rows or columns of the whole one give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paged.errors import UnsupportedError
from paged.models.layers.decoder import Linear
from paged.models.network_loader import load_network
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share, cut
from paged.models.registry import read_model_config
from tests.models.families import save_checkpoint
from tests.models.quantization.checkpoints import CONFIG, write
from tests.models.quantization.packers import FORMATS

# 384 units would be in two parts of 192, and columns that are sorted by group stand in no part.
REFUSED = ("fp8 blocks", "float-quantized blocks", "gptq zeros, order", "pack-quantized zeros, order")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(CONFIG, folder)
    return folder


def _linears(folder: Path, share: Share) -> dict[str, Linear]:
    network_class, config = read_model_config(folder)
    network = load_network(
        network_class,
        config,
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        has_fp8_cache=False,
        ranks=Ranks(share),
    )
    for module in network.modules():
        if isinstance(module, Linear) and module.packed is not None:
            module.packed.bind()
    return {path: module for path, module in network.named_modules() if isinstance(module, Linear)}


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_projections(name: str, base: Path, tmp_path: Path) -> None:
    folder = write(name, base, tmp_path).packed
    _, config = read_model_config(folder)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=r"tensor_parallel_size 2: layers\.0\."):
            _linears(folder, Share(0, 2))
        return
    whole = _linears(folder, Share())
    share = Share(1, 2)
    for path, own in _linears(folder, share).items():
        inputs = torch.randn(3, whole[path].in_features)
        names = [f"model.{path.rpartition('.')[0]}.{part}.weight" for part in own.parts]
        if path == "lm_head":
            names = ["lm_head.weight"]
        if own.in_features < whole[path].in_features:  # of its columns alone, the others' input is 0
            sections = share.sections(config, names[0])
            kept = torch.zeros_like(inputs)
            start, stop = sections[0].start, sections[0].stop
            kept[:, start:stop] = inputs[:, start:stop]
            expected, found = whole[path](kept), own(cut(inputs, sections, 1))
        else:
            expected = torch.cat(
                [
                    cut(part, share.sections(config, one), 1)
                    for part, one in zip(whole[path](inputs).split(whole[path].sizes, 1), names, strict=True)
                ],
                1,
            )
            found = own(inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
