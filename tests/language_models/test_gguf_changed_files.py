"""GGUF files that somebody has changed: `verify` refuses them or says that they are not ok."""

import numpy as np
import pytest
from shared.thoroughness import ALL, sampled

import fakequant as fq
from fakequant._export.gguf.export_gguf import HASHES, NOTE, file_contents
from fakequant._export.gguf.file import Field, FileTensor, GgufFile, digest_of, field, write
from fakequant._verify.verify_gguf import compare_file
from tiny_gguf_models import float_model, prepared, texts, write_base

_CASES = {
    f"{name} {kind}": (name, kind)
    for name, kind in [
        ("llama", "q4_0"), ("llama", "q4_1"), ("llama", "q8_0"), ("llama", "mxfp4"), ("llama", "tq2_0"),
        ("mixtral", "q4_0"), ("gemma2", "q8_0"), ("qwen3", "q4_0"), ("bert", "q8_0"), ("llama base", "q4_0"),
    ]
}  # fmt: skip


@pytest.fixture(scope="module", params=list(sampled(_CASES, "llama base q4_0", "mixtral q4_0")))
def original(request, tmp_path_factory):
    """A prepared model and the contents of its file."""
    name, kind = _CASES[request.param]
    place = tmp_path_factory.mktemp("original")
    if name == "llama base":
        model = float_model()
        base = write_base(model, place / "base.gguf")
        model = fq.prepare(model, fq.recipes.gguf(kind))
    else:
        model, base = prepared(name, kind), None
    contents = file_contents(model, base=base)
    return model, contents, base is not None


def _is_refused(model, metadata, tensors, path, *, hides=True):
    """Writes a file, with a hash that fits its metadata, and returns whether `verify` refuses it."""
    if hides:
        metadata = {**metadata, NOTE: field(digest_of(metadata, NOTE))}
    write(path, metadata, tensors)
    try:
        reports = compare_file(model, GgufFile(path))
    except ValueError as error:
        return bool(str(error))
    return any(report.prepared_differ for report in reports.values())


def _with(tensor, change):
    data = np.array(tensor.read())
    change(data)
    return tensor._replace(read=lambda: data)


def _flip(data, place, bit):
    data.reshape(-1)[place] ^= np.uint8(1 << bit)


def test_the_file_itself_passes(original, tmp_path):
    model, contents, _ = original
    assert not _is_refused(model, contents.metadata, contents.tensors, tmp_path / "f.gguf")


def test_one_changed_bit_is_found(original, tmp_path):
    """A code, a scale, an offset, a norm: one bit in the first, a middle and the last byte of every tensor."""
    model, contents, _ = original
    passed, number = [], 0
    for index, tensor in enumerate(contents.tensors):
        size = tensor.read().size
        for place, bit in ((0, 0), (size // 2, 3), (size - 1, 7))[index % 3 :: 1 if ALL else 3]:
            changed = _with(tensor, lambda data, place=place, bit=bit: _flip(data, place, bit))
            tensors = [*contents.tensors[:index], changed, *contents.tensors[index + 1 :]]
            number += 1
            if not _is_refused(model, contents.metadata, tensors, tmp_path / "f.gguf"):
                passed.append((tensor.name, place, bit))
    assert passed == []
    assert number >= 20


def test_swapped_rows_and_tensors_are_found(original, tmp_path):
    model, contents, _ = original
    passed = []

    def swap(data):
        rows = data.reshape(-1, data.shape[-1])
        rows[[0, 1]] = rows[[1, 0]]

    for index, tensor in enumerate(contents.tensors):
        rows = tensor.read().reshape(-1, tensor.read().shape[-1])
        if len(tensor.shape) < 2 or len(rows) < 2 or np.array_equal(rows[0], rows[1]):
            continue
        tensors = [*contents.tensors[:index], _with(tensor, swap), *contents.tensors[index + 1 :]]
        if not _is_refused(model, contents.metadata, tensors, tmp_path / "f.gguf"):
            passed.append(tensor.name)
    for index, (one, other) in enumerate(zip(contents.tensors, contents.tensors[1:], strict=False)):
        if (one.type, one.shape) == (other.type, other.shape) and not np.array_equal(one.read(), other.read()):
            names = one._replace(name=other.name), other._replace(name=one.name)
            tensors = [*contents.tensors[:index], *names, *contents.tensors[index + 2 :]]
            if not _is_refused(model, contents.metadata, tensors, tmp_path / "f.gguf"):
                passed.append((one.name, other.name))
    assert passed == []


def test_missing_renamed_and_added_tensors_are_found(original, tmp_path):
    model, contents, _ = original
    tensors = contents.tensors
    assert _is_refused(model, contents.metadata, tensors[:-1], tmp_path / "f.gguf")
    renamed = tensors[0]._replace(name="blk.9.attn_q.weight")
    assert _is_refused(model, contents.metadata, [renamed, *tensors[1:]], tmp_path / "f.gguf")
    added = FileTensor("rope_freqs.weight", "F32", (8,), lambda: np.zeros(32, np.uint8))
    assert _is_refused(model, contents.metadata, [*tensors, added], tmp_path / "f.gguf")


def _changed(found):
    """Returns another value of the same type."""
    if isinstance(found.value, bool):
        return not found.value
    if isinstance(found.value, str):
        return found.value + "x"
    return [*found.value[1:], found.value[0]] if isinstance(found.value, list) else found.value * 2 + 1


def test_changed_metadata_is_found(original, tmp_path):
    """Also if the hash of all metadata was computed again, unless the model does not determine a value."""
    model, contents, is_over_base = original
    metadata = contents.metadata
    for name, found in metadata.items():
        if name in (NOTE, "general.architecture"):
            continue
        changed = {**metadata, name: Field(_changed(found), found.type, found.items)}
        assert _is_refused(model, changed, contents.tensors, tmp_path / "f.gguf", hides=False), name
        missing = {key: value for key, value in metadata.items() if key != name}
        assert _is_refused(model, missing, contents.tensors, tmp_path / "f.gguf", hides=False), name
        is_free = name.startswith(("tokenizer.", "general." if is_over_base else "general.name", HASHES))
        if not is_free:
            assert _is_refused(model, changed, contents.tensors, tmp_path / "f.gguf"), name
    assert _is_refused(model, {**metadata, "a.b": field(1)}, contents.tensors, tmp_path / "f.gguf", hides=False)
    without = {name: value for name, value in metadata.items() if name != NOTE}
    assert _is_refused(model, without, contents.tensors, tmp_path / "f.gguf", hides=False)


def test_another_architecture_is_found(original, tmp_path):
    model, contents, _ = original
    changed = {**contents.metadata, "general.architecture": field("gpt2")}
    assert _is_refused(model, changed, contents.tensors, tmp_path / "f.gguf")


def test_truncated_files_are_refused(tmp_path):
    model = prepared("llama", "q4_0")
    fq.export_gguf(model, tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for share in (0, 3, 4, 100, len(whole) // 3, len(whole) // 2, len(whole) - 4096):
        (tmp_path / "part.gguf").write_bytes(whole[:share])
        with pytest.raises(ValueError, match=r"damaged|cannot load|no GGUF|is not"):
            fq.verify(model, tmp_path / "part.gguf", [texts()], runtime="llama.cpp")


def test_a_model_that_was_trained_on_is_refused(tmp_path):
    """One code of one layer has changed since the export."""
    model = prepared("llama", "q4_0")
    fq.export_gguf(model, tmp_path / "model.gguf")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] *= -1
    found = compare_file(model, GgufFile(tmp_path / "model.gguf"))
    assert [report.path for report in found.values() if report.prepared_differ] == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("change", ["rope.freq_base", "attention.layer_norm_rms_epsilon"])
def test_the_run_finds_what_the_file_says_wrongly(change, tmp_path, monkeypatch):
    """Even if an exporter wrote it and the comparison of metadata did not know better."""
    pytest.importorskip("cyllama")
    from fakequant._export.gguf import export_gguf as exporter

    right = exporter.metadata_of
    factor = 2e4 if change.endswith("epsilon") else 100.0
    monkeypatch.setattr(
        exporter, "metadata_of", lambda config: {**right(config), change: right(config)[change] * factor}
    )
    model = prepared("llama", "q8_0")
    fq.export_gguf(model, tmp_path / "model.gguf")
    found = fq.verify(model, tmp_path / "model.gguf", [texts()])
    assert not found.ok
    assert "equal up to rounding" in found.problem
