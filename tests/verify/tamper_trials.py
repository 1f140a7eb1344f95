"""Trials of changed files: what a runtime computes from each, and whether `verify` accepts it."""

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
onnx = pytest.importorskip("onnx")
digest = pytest.importorskip("fakequant._export.notes")
notes = pytest.importorskip("fakequant._export.notes")

# The ends of the names of tensors that `verify` compares by themselves.
OWNED = ("_scale", "_codes", "_zero_point", ".weight", ".bias")


class ResidualCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.pool(self.act(x + self.norm(self.conv(x)))).flatten(1))


def mlp():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))


def image(n):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(n))


def rows(n, *shape):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(n))


def make(build, x, recipe, target):
    """Returns a calibrated model, whose batch norms have factors of both signs."""
    torch.manual_seed(0)
    model = build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_var.uniform_(0.5, 2.0)
    return fq.calibrate(fq.prepare(model, recipe(target=target), x), [x], progress=False)


def is_quantizer(node):
    """Returns True if an operator of a file makes the codes of a quantizer."""
    return any(p.key == notes.QUANTIZER for p in node.metadata_props)


def says_ok(model, file, x, path):
    """Returns whether `verify` accepts a file, which is an ONNX model or bytes."""
    if isinstance(file, bytes):
        path.write_bytes(file)
    else:
        onnx.save(file, path)
    try:
        return fq.verify(model, path, [x]).ok
    except (ValueError, RuntimeError):
        return False


def refreshed(file):
    """Gives a changed file a matching fingerprint, as if it had been exported like this."""
    for note in file.metadata_props:
        if note.key == notes.GRAPH:
            note.value = digest.digest_of_graph(file)
    return file


def misses(run, model, file, x, path, changed_files, most, *, counts_refused=False):
    """Returns the number of files tried, the changes `verify` missed, and the number of files it accepted.

    Files that the runtime refuses are not counted, unless `counts_refused` is set. Then only files that `verify`
    accepts are run, which is faster.

    Args:
        run: A function of a file and a batch. It returns all codes and results as bytes, None if the runtime refuses
            the file.
        model: The prepared model.
        file: The exported file.
        x: The batch.
        path: Where changed files are written.
        changed_files: Descriptions and changed files.
        most: About how many of them are tried.
    """
    expected = run(file, x)
    number, missed, accepted = 0, [], 0
    every = max(1, len(changed_files) // most)
    for what, changed in changed_files[::every]:
        found = None if counts_refused else run(changed, x)
        if found is None and not counts_refused:
            continue
        number += 1
        if says_ok(model, changed, x, path):
            accepted += 1
            if (run(changed, x) if counts_refused else found) != expected:
                missed.append(what)
    return number, missed, accepted
