"""Without the packages that language models need, their tests are not collected."""

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("TQDM_DISABLE", "1")
if any(find_spec(name) is None for name in ("torch", "transformers", "compressed_tensors")):
    collect_ignore_glob = ["*.py"]


@pytest.fixture(autouse=True)
def one_thread():
    """Runs torch on one thread, because its sums depend on the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
