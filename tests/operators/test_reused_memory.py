"""Memory of large results that is used again: only once nothing refers to it."""

import pytest

torch = pytest.importorskip("torch")
compiled = pytest.importorskip("fakequant._backends.torch.compiled_nodes").compiled

pytestmark = pytest.mark.skipif(compiled is None, reason="there are no compiled nodes")

NUMBER = 1 << 18  # 1 MB, the smallest that is kept


def test_memory_is_used_again_once_nothing_refers_to_it():
    compiled.release_memory()
    first = compiled.empty_floats([NUMBER])
    address = first.data_ptr()
    assert compiled.empty_floats([NUMBER]).data_ptr() != address
    del first
    again = [compiled.empty_floats([512, 512]) for _ in range(2)]
    assert address in [x.data_ptr() for x in again]
    assert all(x.shape == (512, 512) and x.is_contiguous() and x.dtype == torch.float32 for x in again)


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x[5:7],
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        torch._lazy_clone,
        lambda x: x.share_memory_(),
    ],
)
def test_memory_in_use_is_not_used_again(keep):
    x = compiled.empty_floats([NUMBER]).fill_(1)
    kept = keep(x)
    del x
    others = [compiled.empty_floats([NUMBER]).fill_(2) for _ in range(4)]
    floats = torch.empty(0).set_(kept) if isinstance(kept, torch.UntypedStorage) else torch.as_tensor(kept)
    assert torch.equal(floats, torch.ones(len(floats)))
    assert all(torch.equal(other, torch.full([NUMBER], 2.0)) for other in others)


def test_released_memory_is_not_kept():
    compiled.release_memory()
    x = compiled.empty_floats([NUMBER])
    compiled.release_memory()  # in use: stays
    assert x.fill_(1).sum() == NUMBER
