"""A rank's part of a network, without the other ranks."""

from pathlib import Path

import torch

from paged.models.families.network import Network
from paged.models.network_loader import load_network
from paged.models.parallel.ranks import Ranks
from paged.models.parallel.share import Share
from paged.models.registry import read_model_config

CPU = torch.device("cpu")


def load_part(folder: Path, share: Share) -> Network:
    network_class, config = read_model_config(folder)
    ranks = Ranks(share)
    return load_network(network_class, config, folder, dtype=torch.float32, device=CPU, cache_kinds=None, ranks=ranks)
